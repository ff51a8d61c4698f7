-- Updates that alternate between host and device
-- claim: 1.5 times as fast as an update on the host alone, with a share for the device that a model of rates chooses
-- system: subgroups of AdamW's states, some stepped on the host, some brought to the device, stepped and sent back
-- paper: Maurya et al. 2024, "Deep Optimizer States: Towards Scalable Training of Transformer Models Using Interleaved
--   Offloading"
-- time: a minute on one CPU core
--
-- There is no GPU here. That losses and parameters do not depend on the share is of the real trainer, bit for bit with
-- the CPU as the device; on the emulated device, whose streams do their work as late as the waits allow, the tests of
-- the module leave out one wait after the other and find each. Times are simulated, entry by entry of the list that the
-- trainer goes through: the host's rates are measured, on one core; those of devices are published peaks, of memory
-- 80 % and of the link what is seen in practice. ZeRO-Offload is the same list with all subgroups on the host, each
-- sent while the next is stepped, which is already faster than one that waits. How much there is to gain depends on
-- what the host has: the eight GPUs of a DGX share the memory of two sockets, and that share (16 channels of DDR4-3200
-- or DDR5-4800, 80 % of their peak) is another machine here. A GPU that has a whole socket to itself gains less; that
-- is said and not judged. A link that takes memory bandwidth from the host is not in the model.
local ty = require "tycho"
local llm = require "tycho.llm"
local offload = require "tycho.offload"
local nn, interleave = ty.nn, offload.interleave

local r = ty.recipe.declare { seeds = 3, args = {
  { "elements", 8000000, "of the update that is timed", quick = 200000 },
  { "billions", 7, "parameters of the simulated model" },
  { "subgroup", 100000000, "elements of its subgroups" },
  { "slots", 2, "subgroups whose states are on the device at a time" },
  { "steps", 6, "of the runs whose losses are compared", quick = 2 },
  { "rounds", 9, "of timing", quick = 1 },
} }
local a = r.args

-- ---- the numbers do not depend on the share ----

local apart = {}
for i, seed in ipairs(r.seeds) do
  local first
  apart[i] = 0
  for _, every in ipairs { math.huge, 1, 2, 3.5 } do
    ty.manual_seed(seed)
    local model = llm.Llama { vocab_size = 256, hidden_size = 64, intermediate_size = 192, num_hidden_layers = 4,
      num_attention_heads = 2, num_key_value_heads = 2, max_position_embeddings = 64 }
    local trainer = offload.deep_opt_states(model, { settings = { lr = 1e-3 }, every = every, subgroup = 30000 })
    local got = {}
    for step = 1, a.steps do
      got[step] = trainer:step(function()
        local ids = ty.randint(0, 256, { 2, 33 })
        return nn.cross_entropy(model(ids:narrow(1, 0, 32)):reshape(64, -1):to "f32", ids:narrow(1, 1, 32):reshape(-1))
      end)
    end
    trainer:close()
    for _, p in ipairs(model:parameters()) do got[#got + 1] = p:detach() end
    first = first or got
    for k, x in ipairs(got) do
      local d = x - first[k]
      apart[i] = math.max(apart[i], ty.is_tensor(d) and d:abs():max():item() or math.abs(d))
    end
  end
end

-- ---- the rates ----

local master, half = ty.rand(a.elements), ty.zeros({ a.elements }, { dtype = "bf16" })
master:set_grad(ty.randn(a.elements) * 1e-3)
local optimizer = ty.optim.AdamW({ master }, { lr = 1e-3 })
optimizer:step()
local _, times = r:time({ step = function() optimizer:step() end,
  convert = function() ty.no_grad(function() half:copy_(master) end) end }, { rounds = a.rounds })
local function rate(name) return a.elements / math.min(table.unpack(times[name])) end
local here = { host = rate "step", convert = rate "convert" }
-- A step moves 28 bytes of an element, converting it 6.
local function memory(bandwidth) return { host = 0.8 * bandwidth / 28, convert = 0.8 * bandwidth / 6 } end
r:say("host: %.2f billion elements a second stepped, %.2f converted", here.host / 1e9, here.convert / 1e9)
r.metrics.host_rate, r.metrics.convert_rate = here.host, here.convert

-- On the device a step reads 16 bytes of an element and writes 14.
local function machine(host, bandwidth, link)
  return { host = host.host, convert = host.convert, device = 0.8 * bandwidth / 30, up = link, down = link }
end
local machines = {
  { name = "A100, this host", rates = machine(here, 2.039e12, 25e9) },
  { name = "H100, this host", rates = machine(here, 3.35e12, 55e9) },
  { name = "A100 of a DGX", rates = machine(memory(51.2e9), 2.039e12, 25e9) },
  { name = "H100 of a DGX", rates = machine(memory(76.8e9), 3.35e12, 55e9) },
  { name = "A100, a socket", rates = machine(memory(204.8e9), 2.039e12, 25e9) },
}

-- ---- the update, simulated ----

local elements = {}
for left = a.billions * 1e9, 1, -a.subgroup do elements[#elements + 1] = math.min(left, a.subgroup) end
local function seconds(every, rates)
  local list = interleave.schedule(interleave.places(#elements, every), a.slots)
  return (interleave.simulate(list, elements, rates))
end

local worst, series, gains = 0.0, {}, {}
for i, m in ipairs(machines) do
  local host = seconds(math.huge, m.rates)
  local every = interleave.stride(m.rates)
  local chosen, best, line = seconds(every, m.rates), host, { x = { 0 }, y = { 1 }, label = m.name }
  for n = 1, #elements do
    local t = seconds(#elements / n, m.rates)
    best = math.min(best, t)
    line.x[#line.x + 1], line.y[#line.y + 1] = n / #elements, host / t
  end
  gains[i], series[i] = host / chosen, line
  worst = math.max(worst, chosen / best)
  local whole = math.max(1, math.min(math.floor(every), 1e6))
  r:say("%-20s host alone %.2f s; every %.2f: %.2f s, %.2f times as fast (the best of all shares %.2f, every %d: %.2f)",
    m.name, host, every, chosen, host / chosen, host / best, whole, host / seconds(whole, m.rates))
  -- What if a rate is half or twice as high?
  for name in pairs(m.rates) do
    for _, factor in ipairs { 0.5, 2 } do
      local rates = {}
      for key, value in pairs(m.rates) do rates[key] = key == name and value * factor or value end
      r.metrics[("machine%d_%s_times_%g"):format(i, name, factor)] = seconds(math.huge, rates)
        / seconds(interleave.stride(rates), rates)
    end
  end
  r.metrics["machine" .. i .. "_every"] = every
end

ty.plot.line { series = series, title = "An update in two places (simulated)",
  x_label = "share of the device", y_label = "times as fast as the host alone", width = 640, height = 400 }
  :save(r:picture "deep-opt-states.png")
os.exit(r:finish {
  { claim = "largest difference of losses and parameters between shares", values = apart, bar = 0, below = true },
  { claim = "update, times as fast as on this host alone (simulated, A100)", measured = gains[1], bar = 1.5 },
  { claim = "likewise, with an H100 of a DGX and its share of the hosts' memory", measured = gains[4], bar = 1.5 },
  { claim = "time with the model's share, of the best share's, of the worst machine", measured = worst, bar = 1.1,
    below = true },
  { claim = "times as fast, with an A100 of a DGX", measured = gains[3], judged = false },
  { claim = "times as fast, with an A100 that has a socket to itself", measured = gains[5], judged = false },
  { claim = "times as fast, with an H100 and this host", measured = gains[2], judged = false },
}, true)
