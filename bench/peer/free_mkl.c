/* MKL asks this function of its own whether the CPU is of its maker, and takes slower code where it is not. A library that
 * is loaded before it answers in its place; on an AMD EPYC of Zen 5 the peer's f32 products become 2.6 times as fast. */
int mkl_serv_intel_cpu_true(void);
int tycho_mkl_asked(void);

static int asked;

int mkl_serv_intel_cpu_true(void) {
  asked++;
  return 1;
}

/* How often it was asked: never, where MKL was linked so that it calls its own function. */
int tycho_mkl_asked(void) { return asked; }
