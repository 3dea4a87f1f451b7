/* Kernel names and argument sizes of an AMDGPU code object, from its NT_AMDGPU_METADATA note.
 *
 * The note is one msgpack map: {"amdhsa.kernels": [{".name": ..., ".args": [{".size": ...,
 * ".value_kind": ...}, ...]}, ...]}. The reader walks it in place and skips what it does not
 * know; any value outside the note's bounds makes the image invalid.
 */
#include <elf.h>
#include <stdlib.h>
#include <string.h>

#include "hip_stub.h"

enum { NT_AMDGPU_METADATA = 32 };

struct reader {
  const unsigned char *at, *end;
  int bad;
};

enum kind { NIL, INTEGER, STRING, ARRAY, MAP, OTHER };
struct value {
  enum kind kind;
  uint64_t number; /* integer, or the length of a string, array or map */
  const char *text;
};

static uint64_t take(struct reader *r, unsigned bytes) {
  uint64_t number = 0;
  if ((size_t)(r->end - r->at) < bytes) {
    r->bad = 1;
    return 0;
  }
  while (bytes--) number = number << 8 | *r->at++;
  return number;
}

/* The next value's head: arrays and maps leave the reader at their first element. */
static struct value head(struct reader *r) {
  struct value v = {NIL, 0, NULL};
  unsigned tag = take(r, 1);
  if (tag < 0x80) v.kind = INTEGER, v.number = tag;
  else if (tag < 0x90) v.kind = MAP, v.number = tag & 15;
  else if (tag < 0xa0) v.kind = ARRAY, v.number = tag & 15;
  else if (tag < 0xc0) v.kind = STRING, v.number = tag & 31;
  else if (tag >= 0xe0) v.kind = INTEGER, v.number = tag;
  else if (tag == 0xc2 || tag == 0xc3) v.kind = INTEGER, v.number = tag & 1;
  else if (tag >= 0xc4 && tag <= 0xc6) v.kind = STRING, v.number = take(r, 1 << (tag - 0xc4));
  else if (tag == 0xca || tag == 0xcb) v.kind = OTHER, take(r, tag == 0xca ? 4 : 8);
  else if (tag >= 0xcc && tag <= 0xcf) v.kind = INTEGER, v.number = take(r, 1 << (tag - 0xcc));
  else if (tag >= 0xd0 && tag <= 0xd3) v.kind = INTEGER, v.number = take(r, 1 << (tag - 0xd0));
  else if (tag >= 0xd9 && tag <= 0xdb) v.kind = STRING, v.number = take(r, 1 << (tag - 0xd9));
  else if (tag == 0xdc || tag == 0xdd) v.kind = ARRAY, v.number = take(r, tag == 0xdc ? 2 : 4);
  else if (tag == 0xde || tag == 0xdf) v.kind = MAP, v.number = take(r, tag == 0xde ? 2 : 4);
  else if (tag != 0xc0) r->bad = 1;
  if (v.kind == STRING) {
    v.text = (const char *)r->at;
    if ((uint64_t)(r->end - r->at) < v.number) r->bad = 1;
    else r->at += v.number;
  }
  if (r->bad) v.kind = NIL, v.number = 0;
  return v;
}

static void skip(struct reader *r, struct value v) {
  uint64_t inner = v.kind == ARRAY ? v.number : v.kind == MAP ? 2 * v.number : 0;
  while (inner-- && !r->bad) skip(r, head(r));
}

static int is(struct value v, const char *text) {
  return v.kind == STRING && v.number == strlen(text) && !memcmp(v.text, text, v.number);
}

/* ".args": sizes of the arguments a launch passes, in order. */
static void read_args(struct reader *r, struct value array, struct stub_function *f) {
  for (uint64_t i = 0; array.kind == ARRAY && i < array.number && !r->bad; i++) {
    struct value map = head(r);
    unsigned size = 0;
    int hidden = 0;
    for (uint64_t k = 0; map.kind == MAP && k < map.number && !r->bad; k++) {
      struct value key = head(r), value = head(r);
      if (is(key, ".size")) size = value.number;
      else if (is(key, ".value_kind"))
        hidden = value.kind == STRING && value.number > 7 && !memcmp(value.text, "hidden_", 7);
      else skip(r, value);
    }
    if (hidden) continue;
    if (f->arg_count == STUB_ARGS) r->bad = 1;
    else f->arg_sizes[f->arg_count++] = size;
  }
}

static void read_kernel(struct reader *r, struct stub_function *f) {
  struct value map = head(r);
  for (uint64_t k = 0; map.kind == MAP && k < map.number && !r->bad; k++) {
    struct value key = head(r), value = head(r);
    if (is(key, ".name") && value.kind == STRING && value.number < STUB_NAME)
      memcpy(f->name, value.text, value.number);
    else if (is(key, ".args")) read_args(r, value, f);
    else skip(r, value);
  }
}

static struct stub_module *read_metadata(struct reader r, int device) {
  struct stub_module *module = NULL;
  struct value map = head(&r);
  for (uint64_t k = 0; map.kind == MAP && k < map.number && !r.bad; k++) {
    struct value key = head(&r), value = head(&r);
    if (!is(key, "amdhsa.kernels") || value.kind != ARRAY || module) {
      skip(&r, value);
      continue;
    }
    if (value.number > 1024) break;
    module = calloc(1, sizeof *module + value.number * sizeof *module->functions);
    if (!module) return NULL;
    module->magic = STUB_MAGIC;
    module->function_count = value.number;
    for (uint64_t i = 0; i < value.number && !r.bad; i++) {
      module->functions[i].magic = STUB_MAGIC;
      module->functions[i].device = device;
      read_kernel(&r, &module->functions[i]);
    }
  }
  if (r.bad) {
    free(module);
    return NULL;
  }
  return module;
}

struct stub_module *stub_parse(const void *image, int device) {
  const unsigned char *base = image;
  const Elf64_Ehdr *elf = image;
  if (!image || memcmp(elf->e_ident, ELFMAG, SELFMAG) || elf->e_machine != EM_AMDGPU) return NULL;
  const Elf64_Phdr *segments = (const void *)(base + elf->e_phoff);
  for (unsigned i = 0; i < elf->e_phnum; i++) {
    if (segments[i].p_type != PT_NOTE) continue;
    const unsigned char *at = base + segments[i].p_offset, *end = at + segments[i].p_filesz;
    while ((size_t)(end - at) >= sizeof(Elf64_Nhdr)) {
      const Elf64_Nhdr *note = (const void *)at;
      const unsigned char *name = at + sizeof *note;
      const unsigned char *desc = name + ((note->n_namesz + 3) & ~3u);
      if (desc > end || (size_t)(end - desc) < note->n_descsz) break;
      if (note->n_type == NT_AMDGPU_METADATA && note->n_namesz == 7 && !memcmp(name, "AMDGPU", 7))
        return read_metadata((struct reader){desc, desc + note->n_descsz, 0}, device);
      at = desc + ((note->n_descsz + 3) & ~3u);
    }
  }
  return NULL;
}
