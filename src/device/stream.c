/* Streams and events, which the CUDA backend has. */
#include "stream.h"

#include "cuda.h"

#define GPU(device) ((device)-TY_CUDA)

int ty_stream_new(int device) { return ty_cuda()->stream_new(GPU(device)); }
int ty_stream_current(int device) {
  return device < TY_CUDA || device >= TY_PINNED ? 0 : ty_cuda()->stream(GPU(device));
}
void ty_stream_use(int device, int stream) { ty_cuda()->stream_use(GPU(device), stream); }
bool ty_stream_done(int device, int stream) { return ty_cuda()->stream_done(GPU(device), stream); }
bool ty_stream_synchronize(int device, int stream) { return ty_cuda()->synchronize(GPU(device), stream); }
void ty_stream_settle(int device, int stream) {
  void *event = ty_event_new(device, false);
  if (event && ty_event_record(device, event, stream)) ty_event_synchronize(device, event);
  if (event) ty_event_free(device, event);
}
bool ty_stream_wait(int device, int stream, int other_device, int other) {
  if (device == other_device && stream == other) return true;
  return ty_cuda()->stream_order(GPU(device), stream, GPU(other_device), other);
}

void *ty_event_new(int device, bool timing) { return ty_cuda()->event_new(GPU(device), timing); }
void ty_event_free(int device, void *event) { ty_cuda()->event_free(GPU(device), event); }
bool ty_event_record(int device, void *event, int stream) {
  return ty_cuda()->event_record(GPU(device), stream, event);
}
bool ty_event_wait(int device, void *event, int stream) { return ty_cuda()->event_wait(GPU(device), stream, event); }
bool ty_event_done(int device, void *event) { return ty_cuda()->event_done(event); }
bool ty_event_synchronize(int device, void *event) { return ty_cuda()->event_synchronize(event); }
bool ty_event_elapsed(int device, void *from, void *to, double *milliseconds) {
  float ms = 0;
  bool ok = ty_cuda()->event_elapsed(from, to, &ms);
  *milliseconds = ms;
  return ok;
}
