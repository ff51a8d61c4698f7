/* Views: one memory seen in several ways, and what an in-place write through one of them means for the others. */
#include "check.h"

void test_views_share_memory(void) {
  ty_tensor *x = counting(TY_INTS(4, 6));
  ty_tensor *block = ty_slice(ty_slice(x, 0, 1, 3, 1), 1, 1, 6, 2); /* rows 1, 2; columns 1, 3, 5 */
  CHECK(block && block->storage == x->storage && block->v.ndim == 2);
  CHECK_INT(block->v.size[0], 2);
  CHECK_INT(block->v.size[1], 3);
  CHECK_NEAR(value_at(block, 0), 7, 0);
  CHECK_NEAR(value_at(block, 5), 17, 0);
  CHECK(ty_fill_(block, -1) != NULL);
  int changed = 0;
  for (int i = 0; i < 24; i++) changed += value_at(x, i) == -1;
  CHECK_INT(changed, 6);
  CHECK_NEAR(value_at(x, 7), -1, 0);
  CHECK_NEAR(value_at(x, 8), 8, 0);

  ty_tensor *same = ty_reshape(x, TY_INTS(24));
  CHECK(same && same->storage == x->storage);
  ty_tensor *copy = ty_reshape(ty_transpose(x, 0, 1), TY_INTS(24));
  CHECK(copy && copy->storage != x->storage);
  CHECK_NEAR(value_at(copy, 1), 6, 0);
  /* converts and broadcasts */
  CHECK(ty_copy_(ty_select(x, 0, 0), ty_full(TY_NO_INTS, 5, TY_I64, TY_CPU), false) != NULL);
  CHECK_NEAR(value_at(x, 5), 5, 0);
  CHECK_NEAR(value_at(same, 0), 5, 0);
}

void test_view_layout(void) {
  ty_tensor *x = counting(TY_INTS(2, 3, 4));
  ty_tensor *p = ty_permute(x, TY_INTS(2, 0, 1));
  CHECK(p && !p->v.contiguous && p->v.stride[0] == 1 && p->v.stride[1] == 12 && p->v.stride[2] == 4);
  CHECK(ty_contiguous(x) && ty_contiguous(x)->storage == x->storage);
  ty_tensor *c = ty_contiguous(p);
  CHECK(c && c->v.contiguous && c->storage != x->storage);
  CHECK_NEAR(value_at(c, 1), 4, 0);
  ty_tensor *e = ty_expand(ty_select(x, 0, 1), TY_INTS(5, -1, 4));
  CHECK(e && e->v.stride[0] == 0 && e->storage == x->storage && e->v.count == 60);
  CHECK_NEAR(value_at(e, 59), 23, 0);
  ty_tensor *none = ty_slice(x, 1, 2, 2, 1);
  CHECK(none && none->v.count == 0 && none->v.contiguous);
  ty_tensor *scalar = ty_select(ty_select(ty_select(x, 0, -1), 0, -1), 0, -1);
  bool ok;
  CHECK_NEAR(ty_item(scalar, &ok), 23, 0);
  CHECK_NEAR(ty_item(scalar, NULL), 23, 0);
  CHECK(isnan(ty_item(NULL, NULL)));
  CHECK(ok && scalar->v.ndim == 0);
  ty_tensor *d = ty_diagonal(ty_select(x, 0, 0), 1, 0, 1);
  CHECK(d && d->v.count == 3);
  CHECK_NEAR(value_at(d, 2), 11, 0);
}

void test_writes_are_noticed(void) {
  ty_tensor *x = counting(TY_INTS(3));
  uint32_t version = x->storage->version;
  CHECK(ty_fill_(ty_slice(x, 0, 0, 1, 1), 9) != NULL);
  CHECK(x->storage->version > version);
  CHECK_FAILS(ty_fill_(ty_expand(ty_select(x, 0, 0), TY_INTS(4)), 1), TY_EINVAL, "fill_|expanded");

  /* exp keeps its result for the backward rule: changing it is an error, not a wrong gradient */
  ty_set_requires_grad(x, true);
  ty_tensor *y = ty_exp(x), *loss = ty_sum(y, TY_NO_INTS, false, TY_DTYPE_DEFAULT);
  bool was = ty_set_grad_enabled(false);
  CHECK(ty_fill_(y, 0) != NULL);
  ty_set_grad_enabled(was);
  CHECK_FAILS(ty_backward(loss), TY_EINVAL, "exp|in place");
  CHECK(ty_grad_of(x) == NULL);
  CHECK_FAILS(ty_fill_(x, 0), TY_EINVAL, "fill_|leaf");

  version = x->storage->version;
  ty_tensor *g = ty_ones(TY_INTS(3), TY_F64, TY_CPU);
  CHECK(ty_sgd_(TY_LIST(x), TY_LIST(g), (ty_tensors){ NULL, 0 }, (ty_tensors){ NULL, 0 }, 0.5, 0, 0, 0, false, 1,
                INFINITY, 0, 1, false, NULL));
  CHECK(x->storage->version > version);
  CHECK_NEAR(value_at(x, 0), 8.5, 0);
}

void test_meta_tensors(void) {
  int64_t before = live_bytes();
  ty_tensor *x = ty_zeros(TY_INTS(1 << 20, 1 << 20), TY_F32, TY_META),
            *w = ty_ones(TY_INTS(1 << 20, 7), TY_F32, TY_META);
  ty_tensor *y = ty_relu(ty_matmul(x, w));
  CHECK(y && y->v.size[0] == 1 << 20 && y->v.size[1] == 7 && ty_device_of(y) == TY_META);
  CHECK(live_bytes() < before + 4096);
  CHECK_FAILS(ty_nonzero(y), TY_EUNSUPPORTED, "nonzero|meta");
  CHECK_FAILS(ty_add(y, ty_ones(TY_INTS(7), TY_F32, TY_CPU)), TY_EINVAL, "add|meta|cpu");
  bool ok;
  ty_item(ty_sum(y, TY_NO_INTS, false, TY_DTYPE_DEFAULT), &ok);
  CHECK(!ok);
}
