-- Signals: what a record shows follows from its parameters; sources differ; items depend on their position alone.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local datasets = require "tycho.datasets"

local M = datasets.signals

check.test("items and batches", function()
  local set = datasets.load "signals"
  check.equal(#set, 20000)
  local item, batch = set:get(3), set:batch { 5, 3 }
  check.equal({ item.signal.shape, item.signal.dtype, item.labels.dtype }, { { 2, 500 }, "f32", "u8" })
  check.ok((batch.signal:select(0, 1) - item.signal):abs():amax():item() < 1e-5, "whatever else is drawn")
  check.equal(batch.labels:select(0, 1):tolist(), item.labels:tolist())
  check.equal(datasets.load("signals", { fields = { "labels" } }):get(3).labels:tolist(), item.labels:tolist())
  for _, options in ipairs { { seed = 1 }, { source = "patch" }, { split = "test" } } do
    local other = datasets.load("signals", options):get(3)
    check.ok((other.signal - item.signal):abs():amax():item() > 0.1)
  end
  check.ok(tostring(set):find "clinic")
end)

check.test("labels follow from the parameters, at the limits", function()
  local p = { rate = 70, pr = 0.15, qrs = 0.09, st = 0, ectopy = 0, fibrillation = false }
  check.equal(M.labels(p), { 0, 0, 0, 0, 0, 0, 0, 0 })
  local function with(key, value)
    local q = {}
    for k, v in pairs(p) do q[k] = v end
    q[key] = value
    local list, on = M.labels(q), {}
    for i, v in ipairs(list) do if v == 1 then on[#on + 1] = i end end
    return on
  end
  check.equal({ with("rate", 101), with("rate", 59), with("pr", 0.21), with("qrs", 0.13) },
    { { 1 }, { 2 }, { 3 }, { 4 } })
  check.equal({ with("st", 0.11), with("st", -0.11), with("ectopy", 0.2), with("fibrillation", true) },
    { { 5 }, { 6 }, { 7 }, { 8 } })
  check.equal(M.findings { 1, 0, 0, 0, 0, 0, 1, 0 }, { "tachycardia", "ectopic beats" })
  for _, source in ipairs(M.sources) do
    local set = datasets.load("signals", { source = source, fields = { "labels", "parameters" } })
    local batch = set:batch(ty.arange(50))
    for i, q in ipairs(batch.parameters) do check.equal(batch.labels:select(0, i - 1):tolist(), M.labels(q)) end
  end
end)

-- Places of R in a lead: the largest sample within 0.2 s, high enough.
local function peaks(lead, high)
  local x, list = lead:tolist(), {}
  for i = 8, #x - 7 do
    local top = x[i] > high
    for j = i - 12, i + 12 do top = top and (not x[j] or x[j] < x[i] or j == i) end
    if top then list[#list + 1] = i end
  end
  return list
end

check.test("the signal shows the rate", function()
  local set, seen = datasets.load("signals", { source = "clinic" }), 0
  local batch = set:batch(ty.arange(60))
  for i, p in ipairs(batch.parameters) do
    if p.ectopy == 0 and not p.fibrillation and math.abs(p.axis) < 0.5 and p.st < 0.1 then
      local list = peaks(batch.signal:select(0, i - 1):select(0, 0), 0.6 * p.r * math.cos(p.axis))
      local rate = 60 * M.rate * (#list - 1) / (list[#list] - list[1])
      check.ok(math.abs(rate / p.rate - 1) < 0.08, ("%g for %g"):format(rate, p.rate))
      seen = seen + 1
    end
  end
  check.ok(seen > 10)
end)

check.test("sources differ in prevalence and in device", function()
  local shares, noise = {}, {}
  for _, source in ipairs(M.sources) do
    local set = datasets.load("signals", { source = source })
    shares[source] = set:batch(ty.arange(400)).labels:to("f32"):mean(0):tolist()
    local x = set:batch(ty.arange(20)).signal
    noise[source] = (x:narrow(2, 1, 499) - x:narrow(2, 0, 499)):abs():median():item() / x:std():item()
  end
  check.ok(shares.holter[2] > 2 * shares.patch[2] and shares.patch[1] > 2 * shares.holter[1])
  check.ok(noise.clinic < noise.holter and noise.clinic < noise.patch)
  for _, list in pairs(shares) do for i, share in ipairs(list) do check.ok(share > 0.02, M.names[i]) end end
end)

check.test("disturbed: other gains and noise, and a stretch is lost where it is strong", function()
  ty.manual_seed(6)
  local x = ty.ones(200, 2, 500)
  local little = M.disturbed(x, 0.3)
  check.close({ little:mean(2):std():item(), (little - little:mean(2, true)):std():item() }, { 0.09, 0.015 }, 0.01)
  check.ok(little:abs():min():item() > 0)
  local much = M.disturbed(x, 1.5)
  local lost = much:eq(0):sum(2)
  check.equal({ lost:min():item(), lost:max():item() }, { 100, 100 })
  check.equal(M.disturbed(x, 0):tolist(), x:tolist())
  check.fails(function() M.disturbed(ty.ones(3)) end, "datasets.signals.disturbed: x: expected [n, leads, samples]")
end)

check.test("a trace is where the signal is", function()
  local picture = M.trace(ty.zeros(2, 40))
  check.equal(picture.shape, { 3, 120, 40 })
  check.ok(picture:select(0, 1):select(1, 5):narrow(0, 38, 1):item() == 20, "ink at 0 mV")
  check.ok(picture:select(0, 1):select(1, 5):narrow(0, 5, 1):item() > 150)
  local shown, text = M.cell(datasets.load("signals"):get(0))
  check.equal({ shown.dtype, type(text) }, { "u8", "string" })
end)

check.test("mistakes", function()
  check.fails(function() datasets.load("signals", { source = "home" }) end, "datasets.signals: source: expected")
  check.fails(function() datasets.load("signals", { split = "tset" }) end, "did you mean test")
  check.fails(function() datasets.load("signals", { fields = { "picture" } }) end, "fields: there is no \"picture\"")
  check.fails(function() datasets.load("signals"):get(20000) end, "Signals:get: i: expected 0 to 19999, got 20000")
  check.fails(function() M.findings { 1 } end, "labels: expected 8, got 1")
  check.fails(function() M.labels {} end, "parameters.rate: expected a number, got nil")
end)

check.finish()
