/* What rows share: teams of threads that hold one state each and put them together in a fixed order. A team is a power
 * of two of neighbouring lanes of a warp, or a whole block. */
#ifndef TY_KERNELS_CUDA_TEAMS_CUH
#define TY_KERNELS_CUDA_TEAMS_CUH

#include "cuda.cuh"

/* A state sent through a shuffle of words. */
template <class S, class Shuffle> TY_DEVICE S ty_state_shuffled(const S &s, const Shuffle &shuffle) {
  static_assert(sizeof(S) % 4 == 0, "states go from thread to thread in words");
  uint32_t words[sizeof(S) / 4];
  memcpy(words, &s, sizeof s);
#pragma unroll
  for (size_t i = 0; i < sizeof(S) / 4; i++) words[i] = shuffle(words[i]);
  S t;
  memcpy(&t, words, sizeof t);
  return t;
}

/* The state of a lane. */
template <class S> TY_DEVICE S ty_state_of(const S &s, int lane) {
  return ty_state_shuffled(s, [lane](uint32_t word) { return __shfl_sync(0xffffffffu, word, lane); });
}

/* The state of the lane `step` further (in groups of lanes that a power of two above `step` makes). */
template <class S> TY_DEVICE S ty_state_across(const S &s, int step) {
  return ty_state_shuffled(s, [step](uint32_t word) { return __shfl_xor_sync(0xffffffffu, word, step); });
}

/* Joins the states of a team; every member gets the result. `join(S &, const S &)` must not mind the order of its
 * arguments. All threads of the block call this; `room` has 32 elements where teams are blocks, and is free again when
 * it returns. */
template <class S, class Join> TY_DEVICE void ty_team_join(S &s, int team, const Join &join, ty_shared_ptr<S> room) {
  for (int step = 1; step < team && step < TY_WARP; step *= 2) {
    S t = ty_state_across(s, step);
    if (threadIdx.x & step) { /* the same bits in all lanes: the earlier comes first */
      join(t, s);
      s = t;
    } else join(s, t);
  }
  if (team <= TY_WARP) return;
  if (threadIdx.x % TY_WARP == 0) room[threadIdx.x / TY_WARP] = s;
  __syncthreads();
  s = room[0];
  for (int w = 1; w < team / TY_WARP; w++) {
    S t = room[w];
    join(s, t);
  }
  __syncthreads();
}

static inline int ty_power_of_two(int64_t least, int most) { /* the first that is not below `least`, or `most` */
  int p = 1;
  while (p < least && p < most) p *= 2;
  return p;
}

#endif
