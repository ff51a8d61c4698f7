-- Recurrent networks as single ops: fast, and they track a state
-- claim: LSTM, GRU and sLSTM as fused recurrences are 10 times as fast as from elementwise ops, and learn parity
-- system: ty.recurrence under nn.LSTM, nn.GRU and nn.SLSTM
-- paper: Pöppel et al. 2024, "FlashRNN: Optimizing Traditional RNNs on Modern Hardware"
-- time: 8 minutes on one CPU core
--
-- Speed: forward and backward against the same cell from elementwise ops, eager and under ty.compile, in turn. The
-- products are the same work in both ways and run near the processor's peak, so the more they weigh (wider states,
-- larger batches), the less there is to win; other loads of a machine move the ratios by a tenth.
-- Parity of all bits so far, at every position: each model gets the best of four rates by validation sequences, and is
-- tested far beyond the lengths that it was trained on, where attention has nothing to track a state with.
local ty = require "tycho"
local datasets = require "tycho.datasets"
local llm = require "tycho.llm"
local nn, optim = ty.nn, ty.optim

local r = ty.recipe.declare {
  seeds = 3,
  args = {
    { "part", "all", "what to run", choices = { "all", "speed", "parity" } },
    { "models", "LSTM,GRU,sLSTM,transformer", "which are to learn parity" },
    { "steps", 600, "training steps", quick = 3 },
    { "batch", 64, "sequences at a time", quick = 8 },
    { "length", 32, "bits of a training sequence" },
    { "longest", 256, "bits of a test sequence", quick = 64 },
    { "width", 64, "hidden size", quick = 16 },
    { "rounds", 21, "measurements of which the median counts", quick = 1 },
  },
}
local args, rows = r.args, {}
if args.longest <= args.length then error("--longest must be above --length", 0) end

-- ---- speed: forward and backward against the same cell, written out ----

local gates_of = { lstm = 4, gru = 3, slstm = 4 }

local function measure(cell, t, b, heads, d)
  ty.manual_seed(r.seed)
  local x = ty.randn(t, b, heads * gates_of[cell] * d):requires_grad_()
  local weight = (ty.randn(heads, gates_of[cell] * d, d) / math.sqrt(d)):requires_grad_()
  local y = ty.recurrence(x, weight, { cell = cell })
  local apart = (y - nn.unfused.recurrence(x, weight, { cell = cell })):abs():max():item()
  if apart > 1e-4 then error(("%s: the two ways are %g apart"):format(cell, apart), 0) end
  local function training(forward)
    return function()
      local out = forward()
      return table.unpack(ty.grad((out * out):sum(), { x, weight }))
    end
  end
  local function plain() return nn.unfused.recurrence(x, weight, { cell = cell }) end
  local times = r:time({
    fused = training(function() return (ty.recurrence(x, weight, { cell = cell })) end), eager = training(plain),
    compiled = ty.compile(training(plain)),
  }, { rounds = args.rounds, warmup = 2 })
  local fused, eager, compiled = 1e3 * times.fused, 1e3 * times.eager, 1e3 * times.compiled
  local name = ("%s, %d steps, batch %d, %d x %d units"):format(cell, t, b, heads, d)
  r:say("%-42s %8.2f ms, from elementwise ops %8.2f (%.1f times), compiled %8.2f (%.1f times)", name, fused, eager,
    eager / fused, compiled, compiled / fused)
  r.metrics[name] = { fused = fused, eager = eager, compiled = compiled }
  return eager / fused
end

if args.part ~= "parity" then
  r:say("forward and backward, %d threads, medians of %d:", ty.threads(), args.rounds)
  local shapes = { { "lstm", 128, 8, 1, 64 }, { "gru", 128, 8, 1, 64 }, { "slstm", 128, 8, 4, 16 } }
  if r.quick then shapes = { { "lstm", 8, 2, 1, 8 }, { "gru", 8, 2, 1, 8 }, { "slstm", 8, 2, 2, 8 } } end
  for _, shape in ipairs(shapes) do
    local ratio = measure(table.unpack(shape))
    rows[#rows + 1] = { claim = "times as fast as elementwise ops: " .. shape[1], measured = ratio, bar = 10 }
  end
  if not r.quick then -- the product weighs more and more
    for _, shape in ipairs { { "lstm", 128, 32, 1, 64 }, { "gru", 128, 32, 1, 64 }, { "slstm", 128, 32, 4, 16 },
      { "lstm", 64, 32, 1, 256 }, { "slstm", 64, 32, 4, 64 } } do
      measure(table.unpack(shape))
    end
  end
end

-- ---- parity: of all bits so far, at every position ----

local Recurrent = nn.module "Recurrent"
function Recurrent:init(layer, width)
  self.embed = nn.Embedding(2, width)
  self.layer = layer
  self.head = nn.Linear(width, 2)
end
function Recurrent:forward(bits) return self.head((self.layer(self.embed(bits)))) end

local width = args.width
local kinds = {
  { name = "LSTM", make = function() return Recurrent(nn.LSTM(width, width), width) end },
  { name = "GRU", make = function() return Recurrent(nn.GRU(width, width), width) end },
  { name = "sLSTM", make = function() return Recurrent(nn.SLSTM(width, width, { heads = 4 }), width) end },
  { name = "transformer", attention = true, make = function()
    return llm.Llama {
      vocab_size = 2, hidden_size = width, intermediate_size = 2 * width, num_hidden_layers = 2,
      num_attention_heads = 4, max_position_embeddings = args.longest,
    }
  end },
}

local function accuracy(model, seed)
  return datasets.parity.score(model, { trained = args.length, longest = args.longest, seed = seed,
    device = r.device })
end

local function train(kind, lr, seed)
  ty.manual_seed(seed)
  local model = kind.make()
  model:to(r.device)
  local optimizer = optim.AdamW(model:parameters(), { lr = lr, weight_decay = 0, clip_norm = 1,
    schedule = optim.warmup(args.steps // 10, optim.cosine { steps = args.steps - args.steps // 10 }) })
  local began = ty.system.clock()
  ty.train.minimize(optimizer, args.steps, function(step)
    local bits, parity = datasets.parity.draw(args.batch, args.length,
      { seed = (seed + 1) * 1000003 + step, device = r.device })
    return ty.cross_entropy(model(bits):reshape(-1, 2), parity:reshape(-1))
  end)
  return model, ty.system.clock() - began
end

if args.part ~= "speed" then
  local rates = r.quick and { 3e-3 } or { 3e-4, 1e-3, 3e-3, 1e-2 }
  local validation, test = 7000000 + r.seed, 8000000 + r.seed -- sequences of their own
  r:say("parity: %d steps of %d sequences of %d bits; right answers at lengths up to %d", args.steps, args.batch,
    args.length, args.longest)
  for _, kind in ipairs(kinds) do
    if not ("," .. args.models .. ","):find("," .. kind.name .. ",", 1, true) then goto continue end
    local best, rate = -1, nil
    for _, lr in ipairs(rates) do -- a seed that is not among those that count
      local near, far = accuracy((train(kind, lr, r.seed + 100)), validation)
      r:say("  %-12s lr %g: validation %.4f up to %d, %.4f beyond", kind.name, lr, near, args.length, far)
      if far > best then best, rate = far, lr end
    end
    local nears, fars, parameters = {}, {}, nil
    for run, seed in ipairs(r.seeds) do
      local model, seconds = train(kind, rate, seed)
      nears[run], fars[run] = accuracy(model, test)
      parameters = model:count_parameters()
      r:say("  %-12s seed %d, lr %g: %.4f up to %d, %.4f beyond; %d parameters, %.0f s", kind.name, seed, rate,
        nears[run], args.length, fars[run], parameters, seconds)
    end
    r.metrics["parity " .. kind.name] = { lr = rate, near = nears, beyond = fars, parameters = parameters }
    if kind.attention then
      rows[#rows + 1] = { claim = kind.name .. ": right beyond the training length, best seed",
        measured = math.max(table.unpack(fars)), values = fars, bar = 0.75, below = true }
    else
      rows[#rows + 1] = { claim = kind.name .. ": right beyond the training length, worst seed",
        measured = math.min(table.unpack(fars)), values = fars, bar = 0.99 }
    end
    ::continue::
  end
end

os.exit(r:finish(rows), true)
