"""Tests, one folder per concern. ``host`` needs Python only; markers say what others need."""
