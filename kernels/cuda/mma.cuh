/* Tensor cores: products of 16 x 16 and 16 x 8 halves, which the 32 threads of a warp hold in fragments, loads of
 * fragments from shared memory, and copies to it that the threads need not wait for. One instruction each on GPUs, from
 * the A100's generation on; the portable twins do the same by the layouts that the instruction set documents.
 *
 * A 16 x 16, B 16 x 8 and the sum C 16 x 8, with row = lane / 4 and pair = 2 (lane % 4), of each two neighbours:
 *   a[0] A[row][pair]   a[1] A[row + 8][pair]   a[2] A[row][pair + 8]   a[3] A[row + 8][pair + 8]
 *   b[0] B[pair][row] and B[pair + 1][row]      b[1] B[pair + 8][row] and B[pair + 9][row]
 *   c[0], c[1] C[row][pair]                     c[2], c[3] C[row + 8][pair]
 * so that the sums of two products side by side, narrowed, are the A of the next. */
#ifndef TY_KERNELS_CUDA_MMA_CUH
#define TY_KERNELS_CUDA_MMA_CUH

#include "cuda.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "the kernels are for GPUs of compute capability 8.0 and later"
#endif

/* Eight halves: what a row of an 8 x 8 matrix is in shared memory. */
typedef ty_pack<uint32_t, 4> ty_chunk;

/* Two halves in a word, the first in its lower half. */
template <class T> TY_DEVICE uint32_t ty_pack_halves(float first, float second);
#ifdef TY_ON_GPU
template <> __device__ __forceinline__ uint32_t ty_pack_halves<ty_f16>(float first, float second) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}
template <> __device__ __forceinline__ uint32_t ty_pack_halves<ty_bf16>(float first, float second) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}
#else
template <class T> TY_DEVICE uint32_t ty_pack_halves(float first, float second) {
  return ty_narrow<T>(first).bits | static_cast<uint32_t>(ty_narrow<T>(second).bits) << 16;
}
#endif

#ifndef TY_CUDA_EMULATED

/* Chunks in shared memory, by an address of 32 bits, whose constant offsets the instructions take. */
class ty_chunks {
public:
  ty_chunks() = default;
  TY_DEVICE_MEMBER ty_chunks(const ty_chunk *p) : address(static_cast<uint32_t>(__cvta_generic_to_shared(p))) {}
  TY_DEVICE_MEMBER ty_chunks operator+(int n) const {
    ty_chunks to = *this;
    to.address += static_cast<uint32_t>(n) * sizeof(ty_chunk);
    return to;
  }
  TY_DEVICE_MEMBER ty_chunk &operator[](int n) const {
    return *static_cast<ty_chunk *>(__cvta_shared_to_generic((*this + n).address));
  }
  uint32_t address;
};

/* Four 8 x 8 matrices. `row` is a row for each thread: threads 8 m to 8 m + 7 have those of matrix m. r[m] gets the
 * elements [lane / 4][2 (lane % 4)] and the next; transposed [2 (lane % 4)][lane / 4] and below. */
TY_DEVICE void ty_load_matrices(uint32_t (&r)[4], ty_chunks row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row.address));
}
TY_DEVICE void ty_load_matrices_transposed(uint32_t (&r)[4], ty_chunks row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row.address));
}

/* c += a b, in f32. */
template <class T> TY_DEVICE void ty_multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if (std::is_same<T, ty_f16>::value)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Copies 16 bytes, from an address that 16 divides, or zeros where `from` is NULL. They are there for this thread once
 * it has waited for the group that it committed them in, for others after a barrier. */
TY_DEVICE void ty_copy_async(ty_chunks to, const void *from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to.address), "l"(from), "r"(from ? 16 : 0)
               : "memory");
}
TY_DEVICE void ty_commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> TY_DEVICE void ty_wait_for_copies() { /* of all groups but the last LEFT */
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

#else

typedef ty_shared_ptr<ty_chunk> ty_chunks;

TY_DEVICE void ty_load_matrices(uint32_t (&r)[4], ty_chunks row) {
  const int lane = ty_emu::lane_number();
  const ty_chunk mine = *row;
  ty_emu::meet(0xffffffffu, &mine, sizeof mine);
  for (int m = 0; m < 4; m++) r[m] = static_cast<const ty_chunk *>(ty_emu::brought(8 * m + lane / 4))->v[lane % 4];
}
TY_DEVICE void ty_load_matrices_transposed(uint32_t (&r)[4], ty_chunks row) {
  const int lane = ty_emu::lane_number(), column = lane / 4;
  const ty_chunk mine = *row;
  ty_emu::meet(0xffffffffu, &mine, sizeof mine);
  for (int m = 0; m < 4; m++) {
    r[m] = 0;
    for (int i = 0; i < 2; i++) {
      const ty_chunk *from = static_cast<const ty_chunk *>(ty_emu::brought(8 * m + lane % 4 * 2 + i));
      r[m] |= (from->v[column / 2] >> column % 2 * 16 & 0xffff) << 16 * i;
    }
  }
}

template <class T> TY_DEVICE void ty_multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct fragment {
    float a[4][2], b[2][2];
  };
  const int lane = ty_emu::lane_number();
  fragment mine;
  for (int i = 0; i < 2; i++) {
    for (int r = 0; r < 4; r++) mine.a[r][i] = ty_widen(T{ static_cast<uint16_t>(a[r] >> 16 * i) });
    mine.b[0][i] = ty_widen(T{ static_cast<uint16_t>(b0 >> 16 * i) });
    mine.b[1][i] = ty_widen(T{ static_cast<uint16_t>(b1 >> 16 * i) });
  }
  ty_emu::meet(0xffffffffu, &mine, sizeof mine);
  for (int i = 0; i < 4; i++) {
    const int below = i / 2, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      const int quad = k % 8 / 2;
      const fragment *x = static_cast<const fragment *>(ty_emu::brought(lane / 4 * 4 + quad));
      const fragment *y = static_cast<const fragment *>(ty_emu::brought(column * 4 + quad));
      c[i] += x->a[below + k / 8 * 2][k % 2] * y->b[k / 8][k % 2];
    }
  }
}

TY_DEVICE void ty_copy_async(ty_chunks to, const void *from) { to.bring(from); }
TY_DEVICE void ty_commit_copies() { ty_emu::commit_copies(); }
template <int LEFT> TY_DEVICE void ty_wait_for_copies() { ty_emu::wait_for_copies(LEFT); }

#endif

/* The words w[i] of the four threads of a quad, which stand in columns, to rows: thread i gets word i of each. */
TY_DEVICE void ty_transpose_quad(uint32_t (&w)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % TY_WARP;
#pragma unroll
  for (int step = 1; step <= 2; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & step) continue;
      const bool upper = lane & step;
      uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? w[i] : w[i + step], step);
      if (upper) w[i] = got;
      else w[i + step] = got;
    }
}

#endif
