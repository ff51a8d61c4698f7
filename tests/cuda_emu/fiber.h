/* Fibers: functions with stacks of their own that hand the processor to one another. */
#ifndef TY_CUDA_EMU_FIBER_H
#define TY_CUDA_EMU_FIBER_H

#include <cstddef>

namespace ty_emu {

class fiber {
public:
  fiber();
  ~fiber();
  fiber(const fiber &) = delete;
  fiber &operator=(const fiber &) = delete;
  /* The next resume() begins `run(argument)`; a fiber that has not ended is dropped. */
  void begin(void (*run)(void *), void *argument);
  void resume();       /* from outside: until it yields or ends */
  static void yield(); /* from inside: back to whoever resumed it */
  bool ended() const { return ended_; }
  static void main();

private:
  size_t size_; /* of what is used of the stack */
  void *stack_, *position_, *outside_;
  void (*run_)(void *);
  void *argument_;
  bool ended_;
  void *outer_fake_, *inner_fake_; /* for the address sanitizer */
  const void *outer_stack_;
  size_t outer_size_;
};

} // namespace ty_emu

#endif
