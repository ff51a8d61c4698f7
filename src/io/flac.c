/* FLAC to floats and back, by libFLAC where the build has it. */
#include <stdlib.h>
#include <string.h>
#include "../ops/op.h"
#include "formats.h"

#ifdef TY_HAVE_FLAC
#include <FLAC/stream_decoder.h>
#include <FLAC/stream_encoder.h>

typedef struct reader {
  const uint8_t *data;
  size_t size, at;
  const char *name;
  ty_bytes samples; /* f32, all channels of a moment side by side */
  int64_t count, most;
  uint64_t total; /* samples that the header promises; 0: it does not say */
  unsigned channels, bits, rate;
  bool failed; /* after ty_fail() */
} reader;

static bool fail(reader *r, const char *text) {
  if (!r->failed) ty_fail(ty_interrupted ? TY_EINTR : TY_EIO, "flac %s: %s", ty_quote_text(r->name), text);
  r->failed = true;
  return false;
}

static FLAC__StreamDecoderReadStatus on_read(const FLAC__StreamDecoder *decoder, FLAC__byte *out, size_t *size,
                                             void *client) {
  reader *r = client;
  size_t left = r->size - r->at;
  (void)decoder;
  if (*size > left) *size = left;
  if (!*size) return FLAC__STREAM_DECODER_READ_STATUS_END_OF_STREAM;
  memcpy(out, r->data + r->at, *size);
  r->at += *size;
  return FLAC__STREAM_DECODER_READ_STATUS_CONTINUE;
}

static FLAC__StreamDecoderSeekStatus on_seek(const FLAC__StreamDecoder *decoder, FLAC__uint64 to, void *client) {
  reader *r = client;
  (void)decoder;
  if (to > r->size) return FLAC__STREAM_DECODER_SEEK_STATUS_ERROR;
  r->at = (size_t)to;
  return FLAC__STREAM_DECODER_SEEK_STATUS_OK;
}

static FLAC__StreamDecoderTellStatus on_tell(const FLAC__StreamDecoder *decoder, FLAC__uint64 *at, void *client) {
  *at = ((reader *)client)->at;
  (void)decoder;
  return FLAC__STREAM_DECODER_TELL_STATUS_OK;
}

static FLAC__StreamDecoderLengthStatus on_length(const FLAC__StreamDecoder *decoder, FLAC__uint64 *size, void *client) {
  *size = ((reader *)client)->size;
  (void)decoder;
  return FLAC__STREAM_DECODER_LENGTH_STATUS_OK;
}

static FLAC__bool on_end(const FLAC__StreamDecoder *decoder, void *client) {
  reader *r = client;
  (void)decoder;
  return r->at == r->size;
}

static bool take_kind(reader *r, unsigned channels, unsigned bits, unsigned rate) {
  if (!r->channels) {
    if (!channels || channels > FLAC__MAX_CHANNELS || !bits || bits > 32 || !rate)
      return fail(r, "no sound: the header has no channels, bits or rate");
    r->channels = channels;
    r->bits = bits;
    r->rate = rate;
  }
  if (r->channels == channels && r->bits == bits && r->rate == rate) return true;
  return fail(r, "channels, bits or rate change on the way");
}

static void on_metadata(const FLAC__StreamDecoder *decoder, const FLAC__StreamMetadata *metadata, void *client) {
  reader *r = client;
  const FLAC__StreamMetadata_StreamInfo *info = &metadata->data.stream_info;
  (void)decoder;
  if (metadata->type != FLAC__METADATA_TYPE_STREAMINFO || r->channels) return;
  if (take_kind(r, info->channels, info->bits_per_sample, info->sample_rate)) r->total = info->total_samples;
}

static FLAC__StreamDecoderWriteStatus on_write(const FLAC__StreamDecoder *decoder, const FLAC__Frame *frame,
                                               const FLAC__int32 *const in[], void *client) {
  reader *r = client;
  const FLAC__FrameHeader *h = &frame->header;
  const unsigned count = h->blocksize, channels = h->channels;
  (void)decoder;
  if (ty_interrupted) fail(r, "interrupted");
  if (r->failed || !take_kind(r, channels, h->bits_per_sample, h->sample_rate))
    return FLAC__STREAM_DECODER_WRITE_STATUS_ABORT;
  /* A frame of silence is a few bytes: memory is bounded by what the caller wants, not by the file. */
  if ((r->count + count) * (int64_t)channels > r->most) {
    if (!r->failed)
      ty_fail(TY_EIO, "flac %s: more than %lld samples; the option max allows more", ty_quote_text(r->name),
              (long long)r->most);
    r->failed = true;
    return FLAC__STREAM_DECODER_WRITE_STATUS_ABORT;
  }
  if (!ty_bytes_reserve(&r->samples, (size_t)count * channels * sizeof(float))) {
    r->failed = true;
    return FLAC__STREAM_DECODER_WRITE_STATUS_ABORT;
  }
  float *out = (float *)(void *)(r->samples.data + r->samples.size);
  const double unit = 1.0 / (double)(1u << (r->bits - 1));
  for (unsigned c = 0; c < channels; c++)
    for (unsigned i = 0; i < count; i++) out[(size_t)i * channels + c] = (float)((double)in[c][i] * unit);
  r->samples.size += (size_t)count * channels * sizeof(float);
  r->count += count;
  return FLAC__STREAM_DECODER_WRITE_STATUS_CONTINUE;
}

static void on_error(const FLAC__StreamDecoder *decoder, FLAC__StreamDecoderErrorStatus status, void *client) {
  (void)decoder;
  fail(client, status == FLAC__STREAM_DECODER_ERROR_STATUS_FRAME_CRC_MISMATCH ? "a frame is damaged: its sum is wrong"
                                                                              : "the file is damaged");
}

/* From the first sample on, or from `from`: reads until `count` (negative: all) are there. */
static bool run(reader *r, FLAC__StreamDecoder *decoder, int64_t from, int64_t count) {
  FLAC__stream_decoder_set_md5_checking(decoder, from == 0 && count < 0);
  if (FLAC__stream_decoder_init_stream(decoder, on_read, on_seek, on_tell, on_length, on_end, on_write, on_metadata,
                                       on_error, r) != FLAC__STREAM_DECODER_INIT_STATUS_OK)
    return fail(r, "the decoder does not start");
  if (!FLAC__stream_decoder_process_until_end_of_metadata(decoder) || r->failed)
    return fail(r, "the header is damaged");
  if (!r->channels) return fail(r, "the header is damaged");
  if (from > 0) {
    if (r->total && (uint64_t)from >= r->total) return true;
    if (!FLAC__stream_decoder_seek_absolute(decoder, (FLAC__uint64)from) || r->failed)
      return fail(r, "the place to begin at is not found");
  }
  while (!r->failed && (count < 0 || r->count < count)) {
    if (!FLAC__stream_decoder_process_single(decoder)) return fail(r, "the file is damaged");
    if (FLAC__stream_decoder_get_state(decoder) == FLAC__STREAM_DECODER_END_OF_STREAM) break;
  }
  if (r->failed) return false;
  int64_t promised = (int64_t)r->total - from;
  if (count >= 0 && count < promised) promised = count;
  if (r->total && r->count < promised) return fail(r, "the file is cut short");
  if (r->total && count < 0 && r->count > promised) return fail(r, "more sound than the header says");
  if (!FLAC__stream_decoder_finish(decoder)) return fail(r, "the file is damaged: the sum of its sound is wrong");
  return true;
}

ty_tensor *ty_flac_decode(const uint8_t *data, size_t size, const char *name, int64_t from, int64_t count, int64_t most,
                          int64_t *rate, int *bits) {
  reader r = { .data = data, .size = size, .name = name, .most = most };
  FLAC__StreamDecoder *decoder = FLAC__stream_decoder_new();
  if (!decoder) {
    ty_fail(TY_ENOMEM, "flac: no memory");
    return NULL;
  }
  ty_tensor *t = NULL;
  if (run(&r, decoder, from, count)) {
    if (count >= 0 && r.count > count) r.count = count;
    t = ty_tensor_new(TY_CPU, TY_F32, 2, (const int64_t[]){ r.channels, r.count });
    const float *in = (const float *)(const void *)r.samples.data;
    float *out = t ? t->v.data : NULL;
    for (unsigned c = 0; t && c < r.channels; c++)
      for (int64_t i = 0; i < r.count; i++) out[c * r.count + i] = in[i * r.channels + c];
    *rate = r.rate;
    *bits = (int)r.bits;
  }
  FLAC__stream_decoder_delete(decoder);
  ty_bytes_free(&r.samples);
  return t;
}

/* ---- writing ---- */

typedef struct writer {
  ty_bytes *out;
  size_t at; /* it goes back to fill in the header */
} writer;

static FLAC__StreamEncoderWriteStatus put(const FLAC__StreamEncoder *encoder, const FLAC__byte *data, size_t size,
                                          uint32_t samples, uint32_t frame, void *client) {
  writer *w = client;
  (void)encoder;
  (void)samples;
  (void)frame;
  size_t end = w->at + size;
  if (end > w->out->size) {
    if (!ty_bytes_reserve(w->out, end - w->out->size)) return FLAC__STREAM_ENCODER_WRITE_STATUS_FATAL_ERROR;
    w->out->size = end;
  }
  memcpy(w->out->data + w->at, data, size);
  w->at = end;
  return FLAC__STREAM_ENCODER_WRITE_STATUS_OK;
}

static FLAC__StreamEncoderSeekStatus go_to(const FLAC__StreamEncoder *encoder, FLAC__uint64 to, void *client) {
  writer *w = client;
  (void)encoder;
  if (to > w->out->size) return FLAC__STREAM_ENCODER_SEEK_STATUS_ERROR;
  w->at = (size_t)to;
  return FLAC__STREAM_ENCODER_SEEK_STATUS_OK;
}

static FLAC__StreamEncoderTellStatus where(const FLAC__StreamEncoder *encoder, FLAC__uint64 *at, void *client) {
  (void)encoder;
  *at = ((writer *)client)->at;
  return FLAC__STREAM_ENCODER_TELL_STATUS_OK;
}

static bool encode(FLAC__StreamEncoder *encoder, writer *w, const int32_t *samples, int64_t count, int channels) {
  enum { AT_ONCE = 1 << 16 };
  FLAC__StreamEncoderInitStatus status = FLAC__stream_encoder_init_stream(encoder, put, go_to, where, NULL, w);
  if (status != FLAC__STREAM_ENCODER_INIT_STATUS_OK)
    return ty_fail(TY_EINVAL, "flac: the encoder does not start: %s", FLAC__StreamEncoderInitStatusString[status]);
  for (int64_t i = 0; i < count; i += AT_ONCE) {
    int64_t n = count - i < AT_ONCE ? count - i : AT_ONCE;
    if (ty_interrupted) return ty_fail(TY_EINTR, "flac: interrupted");
    if (!FLAC__stream_encoder_process_interleaved(encoder, samples + i * channels, (uint32_t)n))
      return ty_fail(TY_EIO, "flac: the sound cannot be written");
  }
  return FLAC__stream_encoder_finish(encoder) || ty_fail(TY_EIO, "flac: the sound cannot be written");
}

bool ty_flac_encode(ty_tensor *sound, int64_t rate, int bits, int level, ty_bytes *out) {
  const ty_view *v = &sound->v;
  if (v->dtype != TY_I32 || v->ndim != 2 || v->size[1] < 1 || v->size[1] > (int64_t)FLAC__MAX_CHANNELS)
    return ty_fail(TY_EINVAL, "flac: expected i32 samples [samples, 1 to %u channels], got %s", FLAC__MAX_CHANNELS,
                   ty_describe(sound));
  if (rate < 1 || rate > (int64_t)FLAC__MAX_SAMPLE_RATE)
    return ty_fail(TY_EINVAL, "flac: rate: expected 1 to %lld samples a second, got %lld",
                   (long long)FLAC__MAX_SAMPLE_RATE, (long long)rate);
  if (bits < 4 || bits > 24) return ty_fail(TY_EINVAL, "flac: bits: expected 4 to 24, got %d", bits);
  if (level < 0 || level > 8) return ty_fail(TY_EINVAL, "flac: level: expected 0 (fast) to 8 (small), got %d", level);
  ty_tensor *host = ty_host_tensor(sound);
  if (!host) return false;
  FLAC__StreamEncoder *encoder = FLAC__stream_encoder_new();
  if (!encoder) {
    ty_release(host);
    return ty_fail(TY_ENOMEM, "flac: no memory");
  }
  const int32_t *samples = host->v.data, most = 1 << (bits - 1);
  const int64_t count = host->v.size[0];
  const int channels = (int)host->v.size[1];
  bool ok = true;
  for (int64_t i = 0; ok && i < count * channels; i++)
    if (samples[i] < -most || samples[i] >= most)
      ok = ty_fail(TY_EINVAL, "flac: sample %d does not fit into %d bits", (int)samples[i], bits);
  FLAC__stream_encoder_set_channels(encoder, (uint32_t)channels);
  FLAC__stream_encoder_set_bits_per_sample(encoder, (uint32_t)bits);
  FLAC__stream_encoder_set_sample_rate(encoder, (uint32_t)rate);
  FLAC__stream_encoder_set_compression_level(encoder, (uint32_t)level);
  FLAC__stream_encoder_set_streamable_subset(encoder, false); /* any rate and number of bits */
  FLAC__stream_encoder_set_total_samples_estimate(encoder, (FLAC__uint64)count);
  writer w = { out, 0 };
  ok = ok && encode(encoder, &w, samples, count, channels);
  FLAC__stream_encoder_delete(encoder);
  ty_release(host);
  return ok;
}

#else

static bool missing(void) {
  return ty_fail(TY_EIO, "flac: this build has no FLAC: install libflac-dev (Debian's name) and build Tycho again");
}

ty_tensor *ty_flac_decode(const uint8_t *data, size_t size, const char *name, int64_t from, int64_t count, int64_t most,
                          int64_t *rate, int *bits) {
  missing();
  return NULL;
}

bool ty_flac_encode(ty_tensor *sound, int64_t rate, int bits, int level, ty_bytes *out) { return missing(); }

#endif
