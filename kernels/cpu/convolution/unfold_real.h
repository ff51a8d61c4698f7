/* Windows and columns for one element type; included by unfold.c with REAL and NAME(x) set. */

/* Row after row of what one tap sees of one plane, for all windows. */
static void NAME(unfold_taps)(void *context, int64_t begin, int64_t end) {
  const columns *q = context;
  const ty_p_pool *p = q->p;
  int64_t taps = p->kernel[0] * p->kernel[1], stride = p->stride[1];
  for (int64_t i = begin; i < end; i++) {
    int64_t plane = i / taps, ky = i % taps / p->kernel[1], kx = i % p->kernel[1], top, bottom, left, right;
    const REAL *x = (const REAL *)q->from + plane * q->h * q->w;
    REAL *restrict y = (REAL *)q->to + i * q->oh * q->ow;
    inside(p, 0, ky, q->h, q->oh, &top, &bottom);
    inside(p, 1, kx, q->w, q->ow, &left, &right);
    for (int64_t j = 0; j < top * q->ow; j++) y[j] = 0;
    for (int64_t oy = top; oy < bottom; oy++) {
      const REAL *restrict row = x + (oy * p->stride[0] - p->padding[0] + ky * p->dilation[0]) * q->w;
      REAL *restrict line = y + oy * q->ow;
      int64_t shift = kx * p->dilation[1] - p->padding[1];
      for (int64_t j = 0; j < left; j++) line[j] = 0;
      if (stride == 1)
        for (int64_t j = left; j < right; j++) line[j] = row[j + shift];
      else
        for (int64_t j = left; j < right; j++) line[j] = row[j * stride + shift];
      for (int64_t j = right; j < q->ow; j++) line[j] = 0;
    }
    for (int64_t j = bottom * q->ow; j < q->oh * q->ow; j++) y[j] = 0;
  }
}

/* Each plane adds up its own taps, in their order. */
static void NAME(fold_planes)(void *context, int64_t begin, int64_t end) {
  const columns *q = context;
  const ty_p_pool *p = q->p;
  int64_t stride = p->stride[1], windows = q->oh * q->ow;
  for (int64_t plane = begin; plane < end; plane++) {
    REAL *restrict y = (REAL *)q->to + plane * q->h * q->w;
    const REAL *x = (const REAL *)q->from + plane * p->kernel[0] * p->kernel[1] * windows;
    for (int64_t j = 0; j < q->h * q->w; j++) y[j] = 0;
    for (int64_t ky = 0; ky < p->kernel[0]; ky++)
      for (int64_t kx = 0; kx < p->kernel[1]; kx++, x += windows) {
        int64_t top, bottom, left, right, shift = kx * p->dilation[1] - p->padding[1];
        inside(p, 0, ky, q->h, q->oh, &top, &bottom);
        inside(p, 1, kx, q->w, q->ow, &left, &right);
        for (int64_t oy = top; oy < bottom; oy++) {
          REAL *restrict row = y + (oy * p->stride[0] - p->padding[0] + ky * p->dilation[0]) * q->w;
          const REAL *restrict line = x + oy * q->ow;
          if (stride == 1)
            for (int64_t j = left; j < right; j++) row[j + shift] += line[j];
          else
            for (int64_t j = left; j < right; j++) row[j * stride + shift] += line[j];
        }
      }
  }
}
