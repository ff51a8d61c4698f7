/* Errors: what they say, and that they leave nothing behind. */
#include <string.h>

#include "check.h"

void test_error_texts(void) {
  ty_tensor *x = ty_ones(TY_INTS(2, 3), TY_F32, TY_CPU), *i = ty_zeros(TY_INTS(2, 3), TY_I64, TY_CPU);
  int64_t before = live_bytes();
  CHECK_FAILS(ty_matmul(x, x), TY_EINVAL, "matmul|[2, 3]");
  CHECK_FAILS(ty_exp(ty_reshape(x, TY_INTS(4, 2))), TY_EINVAL, "reshape|[2, 3]");
  CHECK_FAILS(ty_softmax(x, 2), TY_EINVAL, "softmax|dim|2");
  CHECK_FAILS(ty_dropout(i, 0.5, true), TY_EINVAL, "dropout|float|[2, 3] i64 cpu");
  CHECK_FAILS(ty_zeros(TY_INTS(-1), TY_F32, TY_CPU), TY_EINVAL, "zeros|-1");
  CHECK_FAILS(ty_zeros(TY_INTS(INT64_MAX, INT64_MAX), TY_F32, TY_CPU), TY_EINVAL, "zeros|shape");
  CHECK_FAILS(ty_zeros(TY_INTS(1, 1, 1, 1, 1, 1, 1, 1, 1), TY_F32, TY_CPU), TY_EINVAL, "zeros|8 dimensions");
  CHECK_FAILS(ty_gelu(x, "nearly"), TY_EINVAL, "gelu|approximate|nearly");
  CHECK_FAILS(ty_sgd_(TY_LIST(x), TY_LIST(i), (ty_tensors){ NULL, 0 }, (ty_tensors){ NULL, 0 }, 0.1, 0, 0, 0, false, 1,
                      INFINITY, 0, 1, false, NULL),
              TY_EINVAL, "sgd_|grads|i64");
  CHECK_INT(live_bytes(), before);
  ty_dtype dtype;
  CHECK(ty_dtype_parse("bf16", &dtype) && dtype == TY_BF16);
  CHECK_FAILS(ty_dtype_parse("float", &dtype), TY_EINVAL, "float|f32");
}

/* The first error of an expression stands; one that is handled can be cleared. */
void test_errors_stand(void) {
  ty_tensor *x = ty_ones(TY_INTS(2), TY_F32, TY_CPU);
  CHECK(ty_add(ty_reshape(x, TY_INTS(3)), x) == NULL);
  CHECK(strstr(ty_error(), "reshape") != NULL);
  CHECK(ty_add(x, x) != NULL);
  CHECK(strstr(ty_error(), "reshape") != NULL);
  ty_error_clear();
  CHECK(ty_error()[0] == '\0' && ty_error_code() == TY_OK);
}

void test_index_errors(void) {
  ty_tensor *x = counting(TY_INTS(3, 2));
  ty_tensor *bad = ty_from_data((int64_t[]){ 0, 3 }, TY_I64, 1, (int64_t[]){ 2 });
  ty_tensor *negative = ty_from_data((int32_t[]){ -1 }, TY_I32, 1, (int64_t[]){ 1 });
  CHECK_FAILS(ty_index_select(x, 0, bad), TY_EINDEX, "index_select|index 3 is out of range for size 3");
  CHECK_FAILS(ty_index_select(x, 0, negative), TY_EINDEX, "index -1 is out of range for size 3");
  CHECK_FAILS(ty_embedding(x, bad, -1), TY_EINDEX, "embedding|index 3 is out of range for size 3");
  CHECK_FAILS(ty_gather(x, 1, ty_reshape(bad, TY_INTS(1, 2))), TY_EINDEX, "gather|index 3 is out of range for size 2");
  CHECK_FAILS(ty_scatter(x, 1, ty_reshape(bad, TY_INTS(1, 2)), ty_value_of_int(1)), TY_EINDEX, "scatter|index 3");
  CHECK_FAILS(ty_one_hot(bad, 3), TY_EINDEX, "one_hot|index 3 is out of range for size 3");
  CHECK_NEAR(value_at(x, 5), 5, 0);
}
