/* A HIP driver that runs nothing: it counts calls, records launches and fails on request.
 *
 * Stands in for libamdhip64.so.7 (the soname and the version script are what make it one), so
 * that FlyDSL's runtime links against it. Device memory is host memory; streams and events are
 * numbers. Every entry first counts itself, sleeps and fails if it was told to. A launch is
 * recorded with its argument bytes, sized by the code object's own metadata (hip_stub_elf.c).
 *
 * Controls are the stub_* functions; op_tests/hip_stub/driver.py is their Python side.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hip_stub.h"

#define API(X)                                                                                   \
  X(hipDeviceSynchronize) X(hipDrvLaunchKernelEx) X(hipEventCreateWithFlags) X(hipEventDestroy)  \
  X(hipEventRecord) X(hipEventSynchronize) X(hipFree) X(hipGetDevice) X(hipGetDeviceCount)       \
  X(hipGetErrorName) X(hipGetErrorString) X(hipGetLastError) X(hipHostGetDevicePointer)          \
  X(hipHostRegister) X(hipHostUnregister) X(hipMalloc) X(hipMemcpy) X(hipMemcpyAsync)            \
  X(hipMemset) X(hipMemsetD16Async) X(hipMemsetD32Async) X(hipModuleGetFunction)                 \
  X(hipModuleLaunchKernel) X(hipModuleLoadData) X(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor) \
  X(hipModuleUnload) X(hipSetDevice) X(hipStreamCreate) X(hipStreamDestroy)                      \
  X(hipStreamIsCapturing) X(hipStreamSynchronize) X(hipStreamWaitEvent)

enum {
#define X(name) K_##name,
  API(X)
#undef X
  API_COUNT
};
static const char *const api_names[API_COUNT] = {
#define X(name) #name,
    API(X)
#undef X
};

/* Failing: calls `skip + 1` to `skip + times` from now return `code`. */
static struct {
  atomic_ullong calls;
  atomic_int code, skip, times, delay_us;
} api[API_COUNT];

static _Thread_local int device, last_error;
static atomic_int device_count = 1;
static atomic_uint next_handle = 0x100;

#define ENTER(name)                                                                              \
  do {                                                                                           \
    hip_error injected_ = enter(K_##name);                                                       \
    if (injected_) return last_error = injected_;                                                \
  } while (0)

static hip_error enter(int which) {
  atomic_fetch_add_explicit(&api[which].calls, 1, memory_order_relaxed);
  int delay = atomic_load_explicit(&api[which].delay_us, memory_order_relaxed);
  if (delay) usleep(delay);
  int code = atomic_load_explicit(&api[which].code, memory_order_relaxed);
  if (!code || atomic_fetch_sub(&api[which].skip, 1) > 0) return 0;
  return atomic_fetch_sub(&api[which].times, 1) > 0 ? code : 0;
}

/* ---------------------------------------------------------------- capture */

enum { MAX_CAPTURES = 16 };
static pthread_mutex_t capture_lock = PTHREAD_MUTEX_INITIALIZER;
static void *capturing[MAX_CAPTURES];
static atomic_int captures;

static int is_capturing(void *stream) {
  int found = 0;
  pthread_mutex_lock(&capture_lock);
  for (int i = 0; i < captures; i++) found |= capturing[i] == stream;
  pthread_mutex_unlock(&capture_lock);
  return found;
}

/* ---------------------------------------------------------------- the log */

enum { LOG_CAPACITY = 4096 };
static struct stub_launch launches[LOG_CAPACITY];
static atomic_uint log_size;
static atomic_int logging = 1;

static void record(const struct stub_function *f, const unsigned grid[3], const unsigned block[3],
                   unsigned lds, void *stream, void **params) {
  if (!atomic_load_explicit(&logging, memory_order_relaxed)) return;
  unsigned slot = atomic_fetch_add(&log_size, 1);
  if (slot >= LOG_CAPACITY) return;
  struct stub_launch *launch = &launches[slot];
  memcpy(launch->kernel, f->name, sizeof launch->kernel);
  memcpy(launch->grid, grid, sizeof launch->grid);
  memcpy(launch->block, block, sizeof launch->block);
  launch->lds = lds;
  launch->stream = (uint64_t)stream;
  launch->device = device;
  launch->thread = (uint64_t)pthread_self();
  launch->arg_count = f->arg_count;
  memcpy(launch->arg_sizes, f->arg_sizes, sizeof launch->arg_sizes);
  unsigned at = 0;
  for (unsigned i = 0; i < f->arg_count && at + f->arg_sizes[i] <= STUB_ARG_BYTES; i++) {
    memcpy(launch->args + at, params[i], f->arg_sizes[i]);
    at += f->arg_sizes[i];
  }
}

static hip_error launch(struct stub_function *f, const unsigned grid[3], const unsigned block[3],
                        unsigned lds, void *stream, void **params) {
  if (!f || f->magic != STUB_MAGIC || f->device != device) return last_error = 400;
  for (int i = 0; i < 3; i++)
    if (!grid[i] || !block[i]) return last_error = 1;
  record(f, grid, block, lds, stream, params);
  return 0;
}

/* ---------------------------------------------------------------- controls */

static int find(const char *name) {
  for (int i = 0; i < API_COUNT; i++)
    if (!strcmp(name, api_names[i])) return i;
  return -1;
}

int stub_api(unsigned index, const char **name, unsigned long long *calls) {
  if (index >= API_COUNT) return 0;
  *name = api_names[index];
  *calls = atomic_load(&api[index].calls);
  return 1;
}

int stub_fail(const char *name, int code, int skip, int times) {
  int which = find(name);
  if (which < 0) return -1;
  atomic_store(&api[which].skip, skip);
  atomic_store(&api[which].times, times);
  atomic_store(&api[which].code, code);
  return 0;
}

int stub_delay(const char *name, int microseconds) {
  int which = find(name);
  if (which < 0) return -1;
  atomic_store(&api[which].delay_us, microseconds);
  return 0;
}

void stub_devices(int count) { atomic_store(&device_count, count); }

int stub_capture(void *stream, int on) {
  int status = -1;
  pthread_mutex_lock(&capture_lock);
  if (on && captures < MAX_CAPTURES) {
    capturing[captures++] = stream;
    status = 0;
  }
  for (int i = 0; !on && i < captures; i++)
    if (capturing[i] == stream) {
      capturing[i] = capturing[--captures];
      status = 0;
      break;
    }
  pthread_mutex_unlock(&capture_lock);
  return status;
}

void stub_logging(int on) { atomic_store(&logging, on); }
unsigned stub_log_size(void) { return atomic_load(&log_size); }
unsigned stub_log_capacity(void) { return LOG_CAPACITY; }
const struct stub_launch *stub_log_entry(unsigned index) { return &launches[index]; }

/* What a call into C costs, for benchmarks. */
void stub_nothing(void *unused) {}

void stub_reset(void) {
  for (int i = 0; i < API_COUNT; i++) {
    atomic_store(&api[i].calls, 0);
    atomic_store(&api[i].code, 0);
    atomic_store(&api[i].delay_us, 0);
  }
  atomic_store(&log_size, 0);
  memset(launches, 0, sizeof launches);
}

/* ---------------------------------------------------------------- devices and errors */

hip_error hipGetDevice(int *out) {
  ENTER(hipGetDevice);
  *out = device;
  return 0;
}

hip_error hipSetDevice(int index) {
  ENTER(hipSetDevice);
  if (index < 0 || index >= device_count) return last_error = 101;
  device = index;
  return 0;
}

hip_error hipGetDeviceCount(int *count) {
  ENTER(hipGetDeviceCount);
  *count = device_count;
  return 0;
}

hip_error hipDeviceSynchronize(void) {
  ENTER(hipDeviceSynchronize);
  return 0;
}

hip_error hipGetLastError(void) {
  ENTER(hipGetLastError);
  int error = last_error;
  last_error = 0;
  return error;
}

const char *hipGetErrorName(hip_error code) {
  enter(K_hipGetErrorName);
  static const struct {
    int code;
    const char *name;
  } errors[] = {{0, "hipSuccess"}, {1, "hipErrorInvalidValue"}, {2, "hipErrorOutOfMemory"},
                {98, "hipErrorInvalidDeviceFunction"}, {101, "hipErrorInvalidDevice"},
                {200, "hipErrorInvalidImage"}, {209, "hipErrorNoBinaryForGpu"},
                {400, "hipErrorInvalidHandle"}, {500, "hipErrorNotFound"},
                {700, "hipErrorIllegalAddress"}, {719, "hipErrorLaunchFailure"},
                {900, "hipErrorStreamCaptureUnsupported"}, {906, "hipErrorStreamCaptureImplicit"}};
  for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) return errors[i].name;
  return "hipErrorUnknown";
}

const char *hipGetErrorString(hip_error code) {
  enter(K_hipGetErrorString);
  return hipGetErrorName(code);
}

/* ---------------------------------------------------------------- modules and launches */

hip_error hipModuleLoadData(struct stub_module **out, const void *image) {
  ENTER(hipModuleLoadData);
  if (atomic_load(&captures)) return last_error = 900;
  struct stub_module *module = stub_parse(image, device);
  if (!module) return last_error = 200;
  *out = module;
  return 0;
}

hip_error hipModuleUnload(struct stub_module *module) {
  ENTER(hipModuleUnload);
  if (!module || module->magic != STUB_MAGIC) return last_error = 400;
  module->magic = 0;
  /* The memory is kept, so that a launch from an unloaded module is an error and not a crash. */
  for (unsigned i = 0; i < module->function_count; i++) module->functions[i].magic = 0;
  return 0;
}

hip_error hipModuleGetFunction(struct stub_function **out, struct stub_module *module,
                               const char *name) {
  ENTER(hipModuleGetFunction);
  if (!module || module->magic != STUB_MAGIC) return last_error = 400;
  for (unsigned i = 0; i < module->function_count; i++)
    if (!strcmp(module->functions[i].name, name)) {
      *out = &module->functions[i];
      return 0;
    }
  return last_error = 500;
}

hip_error hipModuleLaunchKernel(struct stub_function *f, unsigned gx, unsigned gy, unsigned gz,
                                unsigned bx, unsigned by, unsigned bz, unsigned lds, void *stream,
                                void **params, void **extra) {
  (void)extra;
  ENTER(hipModuleLaunchKernel);
  return launch(f, (unsigned[]){gx, gy, gz}, (unsigned[]){bx, by, bz}, lds, stream, params);
}

struct launch_config {
  unsigned grid[3], block[3], lds;
  void *stream, *attributes;
  unsigned attribute_count;
};

hip_error hipDrvLaunchKernelEx(const struct launch_config *config, struct stub_function *f,
                               void **params, void **extra) {
  (void)extra;
  ENTER(hipDrvLaunchKernelEx);
  return launch(f, config->grid, config->block, config->lds, config->stream, params);
}

hip_error hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, struct stub_function *f,
                                                             int block, size_t lds) {
  (void)f, (void)block, (void)lds;
  ENTER(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor);
  *blocks = 1;
  return 0;
}

/* ---------------------------------------------------------------- streams and events */

hip_error hipStreamIsCapturing(void *stream, int *status) {
  ENTER(hipStreamIsCapturing);
  *status = is_capturing(stream);
  /* Asking the null stream while another captures is itself an error, as in HIP. */
  if (!stream && !*status && atomic_load(&captures)) return last_error = 906;
  return 0;
}

#define HANDLE(name, ...)                                                                        \
  hip_error name(__VA_ARGS__) {                                                                  \
    ENTER(name);                                                                                 \
    *out = (void *)(uintptr_t)atomic_fetch_add(&next_handle, 1);                                 \
    return 0;                                                                                    \
  }
#define NOTHING(name, ...)                                                                       \
  hip_error name(__VA_ARGS__) {                                                                  \
    ENTER(name);                                                                                 \
    return 0;                                                                                    \
  }
HANDLE(hipStreamCreate, void **out)
NOTHING(hipStreamDestroy, void *stream)
NOTHING(hipStreamSynchronize, void *stream)
NOTHING(hipStreamWaitEvent, void *stream, void *event, unsigned flags)
HANDLE(hipEventCreateWithFlags, void **out, unsigned flags)
NOTHING(hipEventDestroy, void *event)
NOTHING(hipEventRecord, void *event, void *stream)
NOTHING(hipEventSynchronize, void *event)

/* ---------------------------------------------------------------- memory */

hip_error hipMalloc(void **out, size_t bytes) {
  ENTER(hipMalloc);
  *out = malloc(bytes ? bytes : 1);
  return *out ? 0 : (last_error = 2);
}

hip_error hipFree(void *pointer) {
  ENTER(hipFree);
  free(pointer);
  return 0;
}

hip_error hipMemcpy(void *to, const void *from, size_t bytes, int kind) {
  (void)kind;
  ENTER(hipMemcpy);
  memmove(to, from, bytes);
  return 0;
}

hip_error hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
  (void)kind, (void)stream;
  ENTER(hipMemcpyAsync);
  memmove(to, from, bytes);
  return 0;
}

hip_error hipMemset(void *to, int value, size_t bytes) {
  ENTER(hipMemset);
  memset(to, value, bytes);
  return 0;
}

hip_error hipMemsetD16Async(void *to, unsigned short value, size_t count, void *stream) {
  (void)stream;
  ENTER(hipMemsetD16Async);
  for (size_t i = 0; i < count; i++) ((unsigned short *)to)[i] = value;
  return 0;
}

hip_error hipMemsetD32Async(void *to, int value, size_t count, void *stream) {
  (void)stream;
  ENTER(hipMemsetD32Async);
  for (size_t i = 0; i < count; i++) ((int *)to)[i] = value;
  return 0;
}

hip_error hipHostGetDevicePointer(void **out, void *host, unsigned flags) {
  (void)flags;
  ENTER(hipHostGetDevicePointer);
  *out = host;
  return 0;
}

NOTHING(hipHostRegister, void *host, size_t bytes, unsigned flags)
NOTHING(hipHostUnregister, void *host)
