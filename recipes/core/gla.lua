-- Gated linear attention: a state of fixed size in place of keys and values
-- claim: two forms agree, decoding takes the same time at any length, training is faster than softmax attention
-- system: gated linear attention, in chunks for training and as a recurrence for decoding, one native op
-- paper: Yang et al. 2024, "Gated Linear Attention Transformers with Hardware-Efficient Training"
-- time: 10 seconds on two CPU cores
--
-- Both forms are compared with the recurrence in f64, with gates of an untrained layer, strong and hostile ones.
-- Softmax is our own fused attention, in a layer of the same width and heads; all lengths take turns. The first length
-- of a turn finds the caches of the machine full of what softmax attention has read, which makes it look slow.
local ty = require "tycho"
local llm = require "tycho.llm"
local models = require "tycho.models"
local distance, by_steps = ty.recipe.distance, ty.nn.unfused.gated_linear_attention

local r = ty.recipe.declare {
  args = {
    { "longest", 8192, "tokens of the longest sequence that is timed", quick = 512 },
    { "width", 256, "hidden size of the layers that are timed", quick = 64 },
    { "heads", 4, "their heads" },
    { "agree", 1024, "tokens of the sequences on which the forms are compared", quick = 100 },
    { "tokens", 200, "decoded tokens that are timed at each length", quick = 5 },
    { "repeats", 5, "training steps of a layer that are timed at each length", quick = 1 },
  },
}
local args = r.args
local function on_device(t) return r.device == "cpu" and t or t:to(r.device) end
local median = ty.stats.median

-- ---- the two forms ----

-- The op, a token a call.
local function token_by_token(q, k, v, g)
  local state, rows = nil, {}
  for t = 0, q.shape[3] - 1 do
    local function at(x) return x:narrow(2, t, 1) end
    rows[t + 1], state = ty.gated_linear_attention(at(q), at(k), at(v), at(g), state)
  end
  return ty.concat(rows, 2), state
end

local kinds = {
  { "gates of an untrained layer", function(shape) return ty.randn(shape):log_sigmoid() / 16 end },
  { "strong gates, down to exp(-8)", function(shape) return ty.rand(shape) * -8 end },
  -- Next to nothing is forgotten, then everything: sums of such gates have no digits left for the small ones.
  { "hostile gates, of 1 and exp(-1000)", function(shape)
    return ty.where(ty.rand(shape):lt(0.02), -1000, ty.rand(shape) * -0.001)
  end },
}
local apart, off = 0, 0
for _, kind in ipairs(kinds) do
  ty.scope(function()
    ty.no_grad(function()
      local t, h, dk, dv = args.agree, args.heads, args.width // args.heads // 2, args.width // args.heads
      local q, k, v = ty.randn(1, h, t, dk), ty.randn(1, h, t, dk), ty.randn(1, h, t, dv)
      local g = kind[2](q.shape)
      local y, state = by_steps(q:to "f64", k:to "f64", v:to "f64", g:to "f64")
      q, k, v, g = on_device(q), on_device(k), on_device(v), on_device(g)
      local chunks, last = ty.gated_linear_attention(q, k, v, g)
      local steps, other = token_by_token(q, k, v, g)
      local between = math.max(distance(chunks, steps), distance(last, other))
      local from = math.max(distance(chunks, y), distance(steps, y), distance(last, state), distance(other, state))
      r:say("%-36s chunks and recurrence %.1e apart, %.1e from the recurrence in f64", kind[1] .. ":", between, from)
      apart, off = math.max(apart, between), math.max(off, from)
    end)
  end)
end

-- ---- layers of both kinds ----

local lengths = {}
do
  local t = r.quick and 128 or 512
  while t <= args.longest do lengths[#lengths + 1], t = t, 2 * t end
end

local gla = llm.GLA({ vocab_size = 2, hidden_size = args.width, num_hidden_layers = 1, num_heads = args.heads }).model
  .layers[1].attn
local softmax = models.layers.Attention { hidden = args.width, heads = args.heads, kv_heads = args.heads,
  width = args.width // args.heads }
gla:to(r.device)
softmax:to(r.device)
r:say("\nlayers of width %d with %d heads: %d parameters gated linear, %d softmax", args.width, args.heads,
  gla:count_parameters(), softmax:count_parameters())
local cos, sin
do
  local config = { max_position_embeddings = args.longest + 1024, rope_theta = 10000 }
  cos, sin = models.rotary.new("gla", config, args.width // args.heads):table(args.longest + 1024, r.device)
end
local function positions(from, count, more)
  local at = { cos = cos:narrow(0, from, count), sin = sin:narrow(0, from, count) }
  for key, value in pairs(more or {}) do at[key] = value end
  return at
end

-- ---- decoding: the time of a token behind so many others ----

local decoding = {}
ty.no_grad(function()
  local caches = {}
  for i, t in ipairs(lengths) do
    local x = on_device(ty.randn(1, t, args.width))
    caches[i] = { states = models.StateCache.new(1), keys = llm.Cache.new(1, { room = t + args.tokens }) }
    ty.scope(function()
      gla(x, { cache = caches[i].states, layer = 1 })
      softmax(x, positions(0, t, { cache = caches[i].keys, layer = 1 }))
    end)
    caches[i].keys:advance(t)
    decoding[i] = { {}, {} }
  end
  -- All lengths in turn, so that what else the machine does meets them alike.
  local x = on_device(ty.randn(1, 1, args.width))
  for _ = 1, args.tokens do
    for i in ipairs(lengths) do
      local states, keys = caches[i].states, caches[i].keys
      table.insert(decoding[i][1], r:clock(function() gla(x, { cache = states, layer = 1 }) end))
      local at = positions(keys.past, 1, { cache = keys, layer = 1 })
      table.insert(decoding[i][2], r:clock(function() softmax(x, at) end))
      keys:advance(1)
    end
  end
end)

-- ---- training: forward and backward ----

local function step_of(layer, x, weight, at)
  return function() ((layer(x, at)) * weight):sum():backward() end
end
local training = {}
for i, t in ipairs(lengths) do
  local x, weight = on_device(ty.randn(1, t, args.width)):requires_grad_(), on_device(ty.randn(1, t, args.width))
  training[i] = r:time({ step_of(gla, x, weight, {}), step_of(softmax, x, weight, positions(0, t)) },
    { rounds = args.repeats, warmup = r.quick and 0 or 1 })
end

r:say("\n          a token decoded, microseconds    forward and backward, milliseconds")
r:say("  tokens  gated linear   softmax   ratio   gated linear   softmax   ratio")
local crossing, first = math.huge, nil
for i, t in ipairs(lengths) do
  local a, b = median(decoding[i][1]) * 1e6, median(decoding[i][2]) * 1e6
  local c, d = training[i][1] * 1e3, training[i][2] * 1e3
  first = first or a
  decoding[i].ratio = a / first
  if c < d and crossing == math.huge then crossing = t elseif c >= d then crossing = math.huge end
  r:say("%8d  %12.1f  %8.1f  %6.2f  %13.2f  %8.2f  %6.2f", t, a, b, b / a, c, d, d / c)
  r.metrics["decode_" .. t], r.metrics["softmax_decode_" .. t] = a, b
  r.metrics["step_" .. t], r.metrics["softmax_step_" .. t] = c, d
end
local slower = decoding[#lengths].ratio

-- ---- what it comes to ----

os.exit(r:finish {
  { claim = "chunks and recurrence apart, of the largest value", measured = apart, bar = 1e-4, below = true },
  { claim = "both from the recurrence in f64", measured = off, bar = 1e-4, below = true },
  { claim = "a token behind the longest text, of its time behind the shortest", measured = slower, bar = 1.1,
    below = true },
  { claim = "tokens from which on a training step is faster than softmax", measured = crossing, bar = 4096,
    below = true },
}, true)
