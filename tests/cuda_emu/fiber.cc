#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace ty_emu {

namespace {
enum { STACK = 256 << 10, TOP = 4096 };
fiber *running; /* one launch runs at a time, see emulator.cc */
} // namespace

#if defined(__x86_64__)

/* Keeps what the calling convention asks to keep, but for the modes of floating point: no kernel changes them. */
extern "C" void ty_emu_switch(void **from, void *to);
asm(R"(
.text
.globl ty_emu_switch
.hidden ty_emu_switch
.type ty_emu_switch, @function
ty_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size ty_emu_switch, .-ty_emu_switch
.section .note.GNU-stack,"",@progbits
.text
)");

static void swap(void **from, void *to) { ty_emu_switch(from, to); }

/* A stack on which ty_emu_switch() finds zeros for the registers and `entry` to return to. */
static void *fresh(void *stack, size_t size, void (*entry)()) {
  uint64_t *top = reinterpret_cast<uint64_t *>(static_cast<char *>(stack) + size) - 2;
  *--top = 0; /* where `entry` would return to; it never does */
  *--top = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; i++) *--top = 0;
  return top;
}

#else

static void swap(void **from, void *to) {
  ucontext_t self;
  *from = &self;
  swapcontext(&self, static_cast<ucontext_t *>(to));
}

static void *fresh(void *stack, size_t size, void (*entry)()) {
  ucontext_t *c = static_cast<ucontext_t *>(stack); /* at the far end of its stack */
  getcontext(c);
  c->uc_stack.ss_sp = static_cast<char *>(stack) + 4096;
  c->uc_stack.ss_size = size - 4096;
  c->uc_link = nullptr;
  makecontext(c, entry, 0);
  return c;
}

#endif

/* Stacks begin at different places of their pages. All at the same, and what the threads of a block have at the top of
 * their stacks, one after another, would fall into the same few lines of the cache. */
static size_t size_of_next() {
  enum { LINE = 64, LINES = 4096 / LINE, APART = 11 };
  static unsigned stacks;
  return STACK - size_t{ LINE } * (stacks++ * APART % LINES);
}

fiber::fiber()
    : size_(size_of_next()), stack_(mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
      ended_(true) {
  if (stack_ == MAP_FAILED) abort();
}
fiber::~fiber() { munmap(stack_, STACK); }

void fiber::main() {
  fiber *self = running;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &self->outer_stack_, &self->outer_size_);
#endif
  self->run_(self->argument_);
  self->ended_ = true;
  yield();
  abort();
}

void fiber::begin(void (*run)(void *), void *argument) {
#if defined(__SANITIZE_ADDRESS__)
  /* Functions that returned have left nothing poisoned: of one that ended only main() and yield() did not, at the top. Of
   * one that was dropped it may be anything. The whole of each stack each time would cost more than most kernels. */
  size_t left = ended_ ? size_t{ TOP } : size_;
  __asan_unpoison_memory_region(static_cast<char *>(stack_) + size_ - left, left);
#endif
  run_ = run;
  argument_ = argument;
  ended_ = false;
  inner_fake_ = nullptr;
  position_ = fresh(stack_, size_, main);
}

void fiber::resume() {
  fiber *before = running;
  running = this;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&outer_fake_, stack_, STACK);
#endif
  swap(&outside_, position_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(outer_fake_, nullptr, nullptr);
#endif
  running = before;
}

void fiber::yield() {
  fiber *self = running;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(self->ended_ ? nullptr : &self->inner_fake_, self->outer_stack_, self->outer_size_);
#endif
  swap(&self->position_, self->outside_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(self->inner_fake_, &self->outer_stack_, &self->outer_size_);
#endif
}

} // namespace ty_emu
