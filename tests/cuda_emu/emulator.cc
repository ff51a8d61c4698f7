/* Launches: blocks, the turns of their threads, shared memory and its watch. */
#include "emulator.h"

#include <cstdarg>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "../../kernels/base.h"
#include "fiber.h"

namespace ty_emu {

namespace {

enum { MOST_THREADS = 1024, WARP = 32, SHARED = 227 << 10, STATIC_SHARED = 48 << 10 };

struct alignas(16) parcel {
  unsigned char bytes[MOST_BROUGHT];
};
struct warp {
  unsigned arrived = 0;
  parcel coming[WARP], there[WARP];
};
struct copy { /* an asynchronous one, not made yet */
  const region *to;
  int64_t at;
  const void *from;
  int group;
};

enum state { READY, AT_BARRIER, AT_EXCHANGE, ENDED };

struct thread {
  uint3 index;
  int number;
  state now;
  uint32_t block_phase, warp_phase;
  unsigned mask;            /* of the exchange it waits for */
  fiber *stack;             /* from its first turn until it ends */
  std::vector<copy> copies; /* in groups, counted by `committed` */
  int committed;
};

struct device {
  place at;
  const char *kernel;
  closure body;
  std::vector<thread> threads;
  std::vector<warp> warps;
  std::vector<std::unique_ptr<fiber>> stacks;
  std::vector<fiber *> free_stacks; /* the last one that ended is the next to begin: its stack is in the cache */
  thread *self = nullptr;
  std::deque<region> regions;
  std::vector<std::unique_ptr<unsigned char[]>> memory;
  std::vector<std::unique_ptr<shadow[]>> shadows;
  size_t dynamic_bytes, static_bytes;
  int votes = 0, counted = 0;
  bool failed;
  char problem[400];
  unsigned launches = 0;
};

/* One for all threads of the host: a variable of each would cost more than all the rest. */
device d;
std::mutex one_launch;

void run_thread(void *argument) {
  d.body.call(d.body.bytes);
  static_cast<thread *>(argument)->now = ENDED;
}

void begin(thread *t) {
  if (d.free_stacks.empty()) {
    d.stacks.emplace_back(new fiber);
    d.free_stacks.push_back(d.stacks.back().get());
  }
  t->stack = d.free_stacks.back();
  d.free_stacks.pop_back();
  t->stack->begin(run_thread, t);
}

void wait(state what) {
  d.self->now = what;
  fiber::yield();
}

/* Lets every ready thread go on; whether any did. */
bool turn(bool backwards) {
  bool any = false;
  size_t n = d.threads.size();
  for (size_t i = 0; i < n && !d.failed; i++) {
    thread *t = &d.threads[backwards ? n - 1 - i : i];
    if (t->now != READY) continue;
    any = true;
    d.self = t;
    d.at.thread = t->index;
    if (!t->stack) begin(t);
    t->stack->resume();
    if (t->now == ENDED) d.free_stacks.push_back(t->stack);
  }
  return any;
}

/* All that have not ended wait at the barrier: they go on. */
bool open_barrier() {
  bool any = false;
  for (const thread &t : d.threads) {
    if (t.now == AT_EXCHANGE) return false;
    any |= t.now == AT_BARRIER;
  }
  d.counted = d.votes;
  d.votes = 0;
  for (thread &t : d.threads) {
    if (t.now != AT_BARRIER) continue;
    t.now = READY;
    t.block_phase++;
  }
  return any;
}

void report_standstill() {
  int barrier = 0, exchange = 0, ended = 0;
  for (const thread &t : d.threads) {
    barrier += t.now == AT_BARRIER;
    exchange += t.now == AT_EXCHANGE;
    ended += t.now == ENDED;
  }
  d.failed = true;
  snprintf(d.problem, sizeof d.problem,
           "block (%u, %u, %u) stands still: %d threads wait at a barrier, %d for others of their warp, %d have ended",
           d.at.block.x, d.at.block.y, d.at.block.z, barrier, exchange, ended);
}

void run_block(dim3 block, bool backwards) {
  int n = static_cast<int>(block.x * block.y * block.z);
  d.threads.resize(static_cast<size_t>(n));
  d.warps.resize(static_cast<size_t>((n + WARP - 1) / WARP));
  for (warp &w : d.warps) w.arrived = 0;
  d.free_stacks.clear();
  for (const auto &stack : d.stacks) d.free_stacks.push_back(stack.get());
  for (int i = 0; i < n; i++) {
    unsigned u = static_cast<unsigned>(i);
    thread *t = &d.threads[static_cast<size_t>(i)];
    t->index = { u % block.x, u / block.x % block.y, u / (block.x * block.y) };
    t->number = i;
    t->now = READY;
    t->block_phase = t->warp_phase = 0;
    t->mask = 0;
    t->stack = nullptr;
    t->copies.clear();
    t->committed = 0;
  }
  d.regions.clear();
  d.memory.clear();
  d.shadows.clear();
  d.static_bytes = 0;
  d.votes = 0;
  for (;;) {
    if (turn(backwards)) continue;
    if (d.failed) return;
    bool all = true;
    for (const thread &t : d.threads) all &= t.now == ENDED;
    if (all) return;
    if (open_barrier()) continue;
    report_standstill();
    return;
  }
}

const region *add_region(const void *key, const char *name, size_t element, int64_t count) {
  size_t bytes = element * static_cast<size_t>(count);
  d.memory.emplace_back(new unsigned char[bytes + 16]);
  d.shadows.emplace_back(new shadow[static_cast<size_t>(count)]);
  unsigned char *p = d.memory.back().get();
  p += (16 - reinterpret_cast<uintptr_t>(p) % 16) % 16;
  memset(p, 0xff, bytes);
  d.regions.push_back({ key, name, p, d.shadows.back().get(), count });
  return &d.regions.back();
}

const region *find(const void *key) {
  for (const region &r : d.regions)
    if (r.key == key) return &r;
  return nullptr;
}

bool same_warp(int a, int b) { return a / WARP == b / WARP; }

/* Whether what `a` did may come before or after what this thread does now. */
bool unordered(const access &a) {
  const thread *t = d.self;
  if (a.thread < 0 || a.thread == t->number || a.block_phase != t->block_phase) return false;
  return !(same_warp(a.thread, t->number) && a.warp_phase < t->warp_phase);
}

void refuse(const region *r, int64_t at, bool writes, const access &other, bool other_writes) {
  fail("thread %d %s %s[%lld], which thread %d %s without a barrier between them", d.self->number,
       writes ? "writes" : "reads", r->name, static_cast<long long>(at), other.thread, other_writes ? "wrote" : "read");
}

bool run(const char *name, dim3 grid, dim3 block, size_t shared_bytes, const closure &body) {
  std::lock_guard<std::mutex> hold(one_launch);
  d.kernel = name;
  d.body = body;
  d.at.block_size = block;
  d.at.grid_size = grid;
  d.dynamic_bytes = shared_bytes;
  d.failed = false;
  d.launches++;
  for (unsigned z = 0; z < grid.z && !d.failed; z++)
    for (unsigned y = 0; y < grid.y && !d.failed; y++)
      for (unsigned x = 0; x < grid.x && !d.failed; x++) {
        d.at.block = { x, y, z };
        run_block(block, (x + y + z + d.launches) % 2 != 0);
      }
  d.self = nullptr;
  return !d.failed || ty_fail(TY_EUNSUPPORTED, "%s on the emulated device: %s", name, d.problem);
}

} // namespace

place &here() { return d.at; }
int lane_number() { return d.self->number % WARP; }

void fail(const char *format, ...) {
  va_list args;
  va_start(args, format);
  int n = snprintf(d.problem, sizeof d.problem, "block (%u, %u, %u): ", d.at.block.x, d.at.block.y, d.at.block.z);
  vsnprintf(d.problem + n, sizeof d.problem - static_cast<size_t>(n), format, args);
  va_end(args);
  d.failed = true;
  fiber::yield(); /* for good */
  __builtin_unreachable();
}

bool launch_closure(cudaStream_t stream, const char *name, dim3 grid, dim3 block, size_t shared_bytes,
                    const closure &body) {
  uint64_t n = uint64_t{ block.x } * block.y * block.z;
  bool possible = n >= 1 && n <= MOST_THREADS && block.z <= 64 && grid.x >= 1 && grid.y >= 1 && grid.z >= 1 &&
                  grid.x <= 0x7fffffff && grid.y <= 65535 && grid.z <= 65535 && shared_bytes <= SHARED;
  if (!possible)
    return ty_fail(TY_EUNSUPPORTED, "launching %s on cuda: %u x %u x %u blocks of %u x %u x %u threads with %zu bytes",
                   name, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes);
  std::vector<std::max_align_t> bytes((body.size + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
  memcpy(bytes.data(), body.bytes, body.size);
  return enqueue(stream, [=] { return run(name, grid, block, shared_bytes, { body.call, bytes.data(), body.size }); });
}

/* ---- threads that wait for each other ---- */

void block_barrier() { wait(AT_BARRIER); }

void meet(unsigned mask, const void *bytes, size_t size) {
  thread *t = d.self;
  int mine = lane_number();
  warp *w = &d.warps[static_cast<size_t>(t->number / WARP)];
  if (!(mask >> mine & 1)) fail("thread %d is not in the mask %08x of its warp function", t->number, mask);
  memcpy(w->coming[mine].bytes, bytes, size);
  w->arrived |= 1u << mine;
  t->mask = mask;
  if ((w->arrived & mask) != mask) return wait(AT_EXCHANGE);
  w->arrived &= ~mask;
  for (int i = 0; i < WARP; i++) {
    if (!(mask >> i & 1)) continue;
    memcpy(w->there[i].bytes, w->coming[i].bytes, size);
    thread *other = &d.threads[static_cast<size_t>(t->number / WARP * WARP + i)];
    if (other->mask != mask)
      fail("threads %d and %d of a warp meet with the masks %08x and %08x", t->number, other->number, mask,
           other->mask);
    other->warp_phase++;
    other->now = READY;
  }
}

const void *brought(int lane) { return d.warps[static_cast<size_t>(d.self->number / WARP)].there[lane].bytes; }

uint64_t exchange(unsigned mask, uint64_t value, int lane) {
  meet(mask, &value, sizeof value);
  return mask >> lane & 1 ? *static_cast<const uint64_t *>(brought(lane)) : value;
}

unsigned ballot(unsigned mask, bool vote) {
  const uint64_t own = vote;
  meet(mask, &own, sizeof own);
  const parcel *there = d.warps[static_cast<size_t>(d.self->number / WARP)].there;
  unsigned votes = 0;
  for (int lane = 0; lane < WARP; lane++)
    if (mask >> lane & 1) votes |= static_cast<unsigned>(there[lane].bytes[0]) << lane;
  return votes;
}

/* ---- shared memory ---- */

const region *declare(const void *key, const char *name, size_t element, int64_t count) {
  const region *r = find(key);
  if (r) return r;
  d.static_bytes += element * static_cast<size_t>(count);
  if (d.static_bytes > STATIC_SHARED) fail("%zu bytes of shared memory; 48 KiB can be declared", d.static_bytes);
  return add_region(key, name, element, count);
}

const region *declare_dynamic(const char *name, size_t element) {
  static const char key = 0;
  const region *r = find(&key);
  return r ? r : add_region(&key, name, element, static_cast<int64_t>(d.dynamic_bytes / element));
}

void touch(const region *r, int64_t at, bool writes, bool atomic) {
  if (at < 0 || at >= r->count)
    fail("thread %d %s %s[%lld], which has %lld elements", d.self->number, writes ? "writes" : "reads", r->name,
         static_cast<long long>(at), static_cast<long long>(r->count));
  shadow *s = &r->shadows[at];
  if (s->bringer >= 0)
    fail("thread %d %s %s[%lld], where the copy of thread %d has not been waited for", d.self->number,
         writes ? "writes" : "reads", r->name, static_cast<long long>(at), s->bringer);
  if ((!writes || atomic) && !s->written)
    fail("thread %d reads %s[%lld], which nobody has written", d.self->number, r->name, static_cast<long long>(at));
  if (unordered(s->write) && !(atomic && s->write.atomic)) refuse(r, at, writes, s->write, true);
  if (writes && unordered(s->read) && !(atomic && s->read.atomic)) refuse(r, at, writes, s->read, false);
  access mine;
  mine.thread = static_cast<int16_t>(d.self->number);
  mine.atomic = atomic;
  mine.block_phase = d.self->block_phase;
  mine.warp_phase = d.self->warp_phase;
  if (writes) {
    s->write = mine;
    s->written = true;
  }
  /* Of several readers the first of the phase is remembered, unless it is of this warp and another is not. */
  if (!writes || atomic)
    if (!unordered(s->read) || s->read.thread == mine.thread) s->read = mine;
}

void copy_async(const region *r, int64_t at, const void *from) {
  thread *t = d.self;
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0)
    fail("thread %d copies to %s[%lld] from an address that 16 does not divide", t->number, r->name,
         static_cast<long long>(at));
  touch(r, at, true, false);
  r->shadows[at].bringer = static_cast<int16_t>(t->number);
  t->copies.push_back({ r, at, from, t->committed });
}

void commit_copies() { d.self->committed++; }

void wait_for_copies(int groups_left) {
  thread *t = d.self;
  size_t kept = 0;
  for (const copy &c : t->copies) {
    if (c.group >= t->committed - groups_left) {
      t->copies[kept++] = c;
      continue;
    }
    c.to->shadows[c.at].bringer = -1;
    touch(c.to, c.at, true, false);
    unsigned char *to = c.to->bytes + c.at * 16;
    if (c.from) memcpy(to, c.from, 16);
    else memset(to, 0, 16);
  }
  t->copies.resize(kept);
}

} // namespace ty_emu

int __syncthreads_count(int predicate) {
  ty_emu::d.votes += predicate != 0;
  ty_emu::block_barrier();
  return ty_emu::d.counted;
}
