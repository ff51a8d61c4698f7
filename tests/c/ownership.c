/* Who owns a tensor: scopes, kept references, memory of others. */
#include "check.h"

void test_scopes(void) {
  int64_t before = live_bytes();
  ty_tensor *kept;
  ty_scope scope;
  CHECK(ty_scope_open(&scope));
  ty_tensor *x = ty_ones(TY_INTS(100, 100), TY_F32, TY_CPU);
  kept = ty_keep(ty_add(x, x));
  CHECK(live_bytes() >= before + 80000);
  ty_scope_close(&scope);
  CHECK(live_bytes() >= before + 40000);
  CHECK(live_bytes() < before + 80000);
  CHECK_NEAR(value_at(kept, 9999), 2, 0);
  ty_release(kept);
  CHECK_INT(live_bytes(), before);
  ty_release(NULL);
  CHECK(ty_keep(NULL) == NULL && ty_scope_add(NULL) == NULL);
}

void test_nested_scopes(void) {
  ty_scope outer, inner;
  ty_scope_open(&outer);
  int64_t before = live_bytes();
  ty_tensor *total = ty_zeros(TY_INTS(1000), TY_F64, TY_CPU);
  int64_t with_total = live_bytes();
  for (int i = 0; i < 1000; i++) { /* more tensors than the scope's first list holds */
    ty_scope_open(&inner);
    ty_tensor *next = total;
    for (int j = 0; j < 3; j++) next = ty_add(next, 1);
    next = ty_scope_add(ty_keep(ty_sub(next, 2)));
    ty_keep(next);
    ty_scope_close(&inner);
    if (i > 0) ty_release(total);
    total = next;
    CHECK(live_bytes() == with_total + (with_total - before));
  }
  CHECK_NEAR(value_at(total, 0), 1000, 0);
  ty_release(total);
  ty_scope_close(&outer);

  ty_tensor *many[2000];
  ty_scope_open(&outer);
  for (int i = 0; i < 2000; i++) many[i] = ty_full(TY_INTS(3), i, TY_I64, TY_CPU);
  CHECK_NEAR(value_at(many[0], 2), 0, 0);
  CHECK_NEAR(value_at(many[1999], 2), 1999, 0);
  ty_scope_close(&outer);
}

/* One check at the end of an expression is enough. */
void test_null_passes_through(void) {
  ty_tensor *x = ty_ones(TY_INTS(2, 3), TY_F32, TY_CPU), *y = ty_ones(TY_INTS(4), TY_F32, TY_CPU);
  CHECK_FAILS(ty_relu(ty_mul(ty_add(x, y), ty_exp(x))), TY_EINVAL, "add|[2, 3]|[4]");
  CHECK_FAILS(ty_concat(TY_LIST(x, ty_add(x, y)), 0), TY_EINVAL, "add|[2, 3]|[4]");
  bool ok;
  ty_item(ty_add(x, y), &ok);
  CHECK(!ok);
}

static int releases;
static void count_release(void *owner) { releases += *(int *)owner; }

void test_foreign_memory(void) {
  float data[6] = { 1, 2, 3, 4, 5, 6 };
  int one = 1;
  int64_t before = live_bytes();
  releases = 0;
  ty_tensor *t = ty_tensor_wrap(data, TY_F32, 2, (int64_t[]){ 2, 3 }, count_release, &one);
  CHECK(t && t->v.data == data);
  ty_scope scope;
  ty_scope_open(&scope);
  ty_tensor *column = ty_keep(ty_select(t, 1, 2));
  CHECK(ty_fill_(t, 7) != NULL);
  ty_scope_close(&scope);
  CHECK_NEAR(data[5], 7, 0);
  ty_release(t);
  CHECK_INT(releases, 0); /* the view still uses it */
  CHECK_NEAR(value_at(column, 1), 7, 0);
  ty_release(column);
  CHECK_INT(releases, 1);
  CHECK_FAILS(ty_tensor_wrap(data, TY_F32, 1, (int64_t[]){ -1 }, count_release, &one), TY_EINVAL, "shape");
  CHECK_INT(releases, 2); /* on failure too */
  for (int n = 1; n <= 3; n++) {
    ty_memory_fail_at(n, false);
    CHECK_FAILS(ty_tensor_wrap(data, TY_F32, 1, (int64_t[]){ 6 }, count_release, &one), TY_ENOMEM, "out of memory");
    ty_memory_fail_at(0, false);
    CHECK_INT(releases, 2 + n);
  }
  CHECK_INT(live_bytes(), before);
}
