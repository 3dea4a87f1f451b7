"""Small helpers shared by host code: element types."""
