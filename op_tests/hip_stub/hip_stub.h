/* What the driver (hip_stub.c) and the reader of code objects (hip_stub_elf.c) share. */
#ifndef HIP_STUB_H
#define HIP_STUB_H

#include <stdint.h>

typedef int hip_error;

enum { STUB_MAGIC = 0x48495053, STUB_NAME = 128, STUB_ARGS = 128, STUB_ARG_BYTES = 1024 };

/* A kernel of a loaded module. Hidden arguments, which no launch passes, are not counted. */
struct stub_function {
  int magic, device;
  char name[STUB_NAME];
  unsigned arg_count, arg_sizes[STUB_ARGS];
};

struct stub_module {
  int magic;
  unsigned function_count;
  struct stub_function functions[];
};

/* One recorded launch; `args` holds the arguments' bytes one after another. */
struct stub_launch {
  char kernel[STUB_NAME];
  unsigned grid[3], block[3], lds;
  int device;
  uint64_t stream, thread;
  unsigned arg_count, arg_sizes[STUB_ARGS];
  unsigned char args[STUB_ARG_BYTES];
};

/* The kernels of the ELF code object at `image`, for `device`; NULL if it is not one. */
struct stub_module *stub_parse(const void *image, int device);

#endif
