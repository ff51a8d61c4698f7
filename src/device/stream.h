/* Streams of a GPU: what is given to one is done in order, what is given to two in any order, unless one waits for the
 * other or for an event. A stream is a number below TY_MAX_STREAMS; 0 is there from the beginning. On the CPU, where
 * everything is done at once, the only stream is 0. */
#ifndef TY_STREAM_H
#define TY_STREAM_H

#include "../tensor/tensor.h"

int ty_stream_new(int device);     /* -1 after ty_fail(); numbers come round again when there are too many */
int ty_stream_current(int device); /* that this thread gives work to */
void ty_stream_use(int device, int stream);
bool ty_stream_done(int device, int stream); /* whether nothing is left to do */
/* Waits for a stream; false after ty_fail() with what went wrong on its GPU. */
bool ty_stream_synchronize(int device, int stream);
void ty_stream_settle(int device, int stream); /* the same without a look at what went wrong */
/* What `stream` is given from now on waits for what the other has been given so far. */
bool ty_stream_wait(int device, int stream, int other_device, int other);

/* A place in a stream. */
void *ty_event_new(int device, bool timing); /* NULL after ty_fail() */
void ty_event_free(int device, void *event);
bool ty_event_record(int device, void *event, int stream);
bool ty_event_wait(int device, void *event, int stream); /* the stream waits, the host does not */
bool ty_event_done(int device, void *event);             /* also when it was never recorded */
bool ty_event_synchronize(int device, void *event);
bool ty_event_elapsed(int device, void *from, void *to, double *milliseconds); /* of events with timing that are done */

#endif
