/* BLEU of token ids; kernels/cpu/reduction/bleu.c says how n-grams become exact keys. A block takes a candidate and keeps the
 * table of its n-grams in shared memory, or in scratch memory where it is too long for that. What n-gram gets which
 * place depends on the timing; the counts do not. */
#include "../bleu.h"
#include "cuda.cuh"

enum { THREADS = 128, MOST_SHARED = 96 << 10 };

typedef unsigned long long word;          /* what atomics take */
static constexpr word EMPTY = ~word{ 0 }; /* only an id can be that, and has a place of its own behind the others */

struct bleu_job {
  ty_p_bleu p;
  int64_t n, t, r, s;
  const int64_t *x, *y, *x_lengths, *y_lengths;
  int64_t *counts;
  char *scratch;
  int64_t each; /* bytes of scratch of a block */
  int bits;     /* of places in a table */
  ty_cuda_watch watch;
};

/* Arrays of 2^bits + 1 words each. */
template <class P> struct bleu_table {
  P keys, count, best, now;
  int bits;
  TY_DEVICE_MEMBER int64_t places() const { return (int64_t{ 1 } << bits) + 1; }
  TY_DEVICE_MEMBER int first(word key) const { return static_cast<int>(key * 0x9e3779b97f4a7c15ull >> (64 - bits)); }
  TY_DEVICE_MEMBER int next(int at) const { return (at + 1) & ((1 << bits) - 1); }

  TY_DEVICE_MEMBER int insert(word key) const {
    if (key == EMPTY) return 1 << bits;
    int at = first(key);
    for (;;) {
      word was = atomicCAS(keys + at, EMPTY, key);
      if (was == EMPTY || was == key) return at;
      at = next(at);
    }
  }
  TY_DEVICE_MEMBER int find(word key) const { /* -1: the candidate does not have it */
    if (key == EMPTY) return count[1 << bits] ? 1 << bits : -1;
    for (int at = first(key);; at = next(at)) {
      const word here = keys[at];
      if (here == key) return at;
      if (here == EMPTY) return -1;
    }
  }
};

/* The length of a row: as given, or up to the padding; -1 for one that may be absent, and is. All threads of the block
 * call it. */
TY_DEVICE int64_t length_of(const bleu_job &j, const int64_t *ids, int64_t most, const int64_t *given, bool may_lack,
                            ty_shared_ptr<int64_t> room) {
  if (given) {
    if (*given < 0 && may_lack) return -1;
    return ty_in_range(j.watch, *given, most + 1) ? *given : 0;
  }
  int64_t first = most;
  for (int64_t i = threadIdx.x; i < first; i += THREADS)
    if (ids[i] == j.p.padding) first = i;
  first = ty_block_reduce(first, ty_smaller<int64_t>{}, room);
  return first == 0 && may_lack ? -1 : first;
}

TY_DEVICE bool key_of(const int64_t *ids, const int32_t *grams, const int32_t *ones, int64_t n, int64_t i, word *key) {
  if (n == 1) {
    *key = static_cast<word>(ids[i]);
    return true;
  }
  const int32_t first = grams[i], last = ones[i + n - 1];
  *key = static_cast<word>(first) << 32 | static_cast<word>(last);
  return first >= 0 && last >= 0;
}

/* Matches of n-grams of one order; all threads of the block have passed a barrier when it returns. */
template <class P>
TY_DEVICE int64_t count_order(const bleu_job &j, const bleu_table<P> &table, int64_t row, int64_t n,
                              const int64_t *lengths, int32_t *grams, ty_shared_ptr<int64_t> room) {
  for (int64_t i = threadIdx.x; i < table.places(); i += THREADS) {
    table.keys[i] = EMPTY;
    table.count[i] = word{ 0 };
    table.best[i] = word{ 0 };
    table.now[i] = word{ 0 };
  }
  __syncthreads();
  const int64_t *ids = j.x + row * j.t;
  int32_t *ones = grams + j.t, *theirs = ones + j.t;
  for (int64_t i = threadIdx.x; i + n <= lengths[0]; i += THREADS) {
    word key;
    key_of(ids, grams, ones, n, i, &key);
    const int at = table.insert(key);
    atomicAdd(table.count + at, word{ 1 });
    grams[i] = at;
    if (n == 1) ones[i] = at;
  }
  __syncthreads();
  for (int64_t k = 0; k < j.r; k++, theirs += 2 * j.s) {
    ids = j.y + (row * j.r + k) * j.s;
    for (int64_t i = threadIdx.x; i + n <= lengths[1 + k]; i += THREADS) {
      word key;
      const int at = key_of(ids, theirs, theirs + j.s, n, i, &key) ? table.find(key) : -1;
      if (at >= 0) atomicAdd(table.now + at, word{ 1 });
      theirs[i] = at;
      if (n == 1) theirs[j.s + i] = at;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < table.places(); i += THREADS) {
      const word now = table.now[i];
      if (now == 0) continue;
      if (now > table.best[i]) table.best[i] = now;
      table.now[i] = word{ 0 };
    }
    __syncthreads();
  }
  int64_t matches = 0;
  for (int64_t i = threadIdx.x; i < table.places(); i += THREADS) {
    const word count = table.count[i], best = table.best[i];
    matches += static_cast<int64_t>(count < best ? count : best);
  }
  return ty_block_reduce(matches, ty_plus<int64_t>{}, room);
}

template <class P, class O>
TY_DEVICE void count_rows(const bleu_job &j, const bleu_table<P> &table, O *score, const double *weights) {
  TY_SHARED(int64_t, room, TY_WARP);
  int64_t *lengths = reinterpret_cast<int64_t *>(j.scratch + blockIdx.x * j.each);
  int32_t *grams = reinterpret_cast<int32_t *>(lengths + 1 + j.r);
  const int64_t order = j.p.order;
  for (int64_t row = blockIdx.x; row < j.n; row += gridDim.x) {
    int64_t *counts = j.counts + row * (2 * order + 2);
    const int64_t length = length_of(j, j.x + row * j.t, j.t, j.x_lengths ? j.x_lengths + row : nullptr, false, room);
    int64_t closest = -1;
    for (int64_t k = row * j.r; k < (row + 1) * j.r; k++) {
      const int64_t other = length_of(j, j.y + k * j.s, j.s, j.y_lengths ? j.y_lengths + k : nullptr, true, room);
      if (other >= 0 && (closest < 0 || ty_bleu_closer(other, closest, length))) closest = other;
      if (threadIdx.x == 0) lengths[1 + k - row * j.r] = other;
    }
    if (threadIdx.x == 0) {
      lengths[0] = length;
      counts[2 * order] = length;
      counts[2 * order + 1] = closest < 0 ? 0 : closest;
    }
    int64_t matches = 1; /* where none match, no longer ones do */
    for (int64_t n = 1; n <= order; n++) {
      matches = matches && n <= length ? count_order(j, table, row, n, lengths, grams, room) : 0;
      if (threadIdx.x != 0) continue;
      counts[n - 1] = matches;
      counts[order + n - 1] = n <= length ? length - n + 1 : 0;
    }
    if (threadIdx.x == 0 && !j.p.corpus) score[row] = static_cast<O>(ty_bleu_score(counts, weights, &j.p));
    __syncthreads(); /* before the next row's lengths are written */
  }
}

template <class O> __global__ void __launch_bounds__(THREADS) bleu_shared(bleu_job j, O *score, const double *weights) {
  TY_SHARED_DYNAMIC(word, words);
  const int64_t places = (int64_t{ 1 } << j.bits) + 1;
  const bleu_table<ty_shared_ptr<word>> table = { words, words + places, words + 2 * places, words + 3 * places,
                                                  j.bits };
  count_rows(j, table, score, weights);
}

template <class O> __global__ void __launch_bounds__(THREADS) bleu_long(bleu_job j, O *score, const double *weights) {
  const int64_t places = (int64_t{ 1 } << j.bits) + 1;
  word *words = reinterpret_cast<word *>(j.scratch + (blockIdx.x + 1) * j.each) - 4 * places;
  const bleu_table<word *> table = { words, words + places, words + 2 * places, words + 3 * places, j.bits };
  count_rows(j, table, score, weights);
}

/* One block: the score of the sums over all candidates. An order without n-grams counts as one in each, as in NLTK. */
template <class O>
__global__ void __launch_bounds__(THREADS) bleu_corpus(bleu_job j, int64_t *sums, O *score, const double *weights) {
  TY_SHARED(int64_t, room, TY_WARP);
  const int64_t order = j.p.order, width = 2 * order + 2;
  for (int64_t i = 0; i < width; i++) {
    const int64_t least = i >= order && i < 2 * order;
    int64_t sum = 0;
    for (int64_t row = threadIdx.x; row < j.n; row += THREADS) {
      const int64_t x = j.counts[row * width + i];
      sum += x < least ? least : x;
    }
    sum = ty_block_reduce(sum, ty_plus<int64_t>{}, room);
    if (threadIdx.x == 0) sums[i] = sum;
  }
  if (threadIdx.x == 0) *score = static_cast<O>(ty_bleu_score(sums, weights, &j.p));
}

template <class O> static bool run(bleu_job j, O *score, const double *weights) {
  if (j.n) {
    j.bits = 1;
    while (int64_t{ 1 } << j.bits < 2 * j.t) j.bits++; /* at most half full */
    const int64_t words = 4 * ((int64_t{ 1 } << j.bits) + 1) * static_cast<int64_t>(sizeof(word));
    const bool fits = words <= MOST_SHARED;
    const unsigned blocks = ty_cuda_blocks(j.n, 1, 1);
    j.each = (1 + j.r) * 8 + (j.t + j.r * j.s) * 2 * 4 + (fits ? 0 : words);
    ty_cuda_scratch scratch(static_cast<size_t>(blocks) * static_cast<size_t>(j.each));
    if (!scratch.data) return false;
    j.scratch = scratch.as<char>();
    if (!(fits ? TY_LAUNCH((bleu_shared<O>), blocks, THREADS, static_cast<size_t>(words), j, score, weights)
               : TY_LAUNCH((bleu_long<O>), blocks, THREADS, 0, j, score, weights)))
      return false;
  }
  if (!j.p.corpus) return true;
  ty_cuda_scratch room(static_cast<size_t>(2 * j.p.order + 2) * sizeof(int64_t));
  int64_t *sums = room.as<int64_t>();
  return sums && TY_LAUNCH((bleu_corpus<O>), 1, THREADS, 0, j, sums, score, weights);
}

TY_CUDA_KERNEL(bleu) {
  const ty_view *x = k->in[0], *y = k->in[1];
  bleu_job j = {};
  j.p = *static_cast<const ty_p_bleu *>(k->params);
  j.n = x->size[0];
  j.t = x->size[1];
  j.r = y->ndim == 3 ? y->size[1] : 1;
  j.s = y->size[y->ndim - 1];
  j.x = ty_data_of<const int64_t>(x);
  j.y = ty_data_of<const int64_t>(y);
  j.x_lengths = ty_data_of<const int64_t>(k->in[2]);
  j.y_lengths = ty_data_of<const int64_t>(k->in[3]);
  j.counts = ty_data_of<int64_t>(k->out[1]);
  j.watch = ty_cuda_watched();
  const double *weights = ty_data_of<const double>(k->in[4]);
  return ty_for_reals(k->out[0]->dtype, "bleu",
                      [&](auto zero) { return run(j, ty_data_of<decltype(zero)>(k->out[0]), weights); });
}
