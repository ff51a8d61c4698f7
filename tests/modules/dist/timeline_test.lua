-- What a rank did when: a picture of bars, and time of decoding.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local dist = require "tycho.dist"

check.test("bars are where they should be", function()
  local path = os.tmpname()
  os.remove(path)
  path = path .. ".png"
  dist.timeline({ { label = "above", bars = { { 0, 0.1 }, { 0.3, 0.4 } }, color = { 1, 0, 0 } },
    { label = "below", bars = { { 0.1, 0.3 } }, color = { 0, 0, 1 } } },
    { width = 400, height = 300, from = 0, to = 0.35 }):save(path)
  local x = ty.io.load_image(path):to "i64"
  os.remove(path)
  local red = x[0]:gt(200):logical_and(x[1]:lt(80)):logical_and(x[2]:lt(80))
  local blue = x[2]:gt(200):logical_and(x[0]:lt(80)):logical_and(x[1]:lt(80))
  -- Columns of pixels that have some between two heights, below the legend.
  local function columns(mask, from, to) return mask:narrow(0, from, to - from):any({ 0 }):to("i64"):sum():item() end
  local reds, blues = columns(red, 90, 145), columns(blue, 160, 220)
  check.equal(reds > 100 and columns(red, 160, 220) == 0, true, "the first row is on top")
  check.equal(blues > 100 and columns(blue, 90, 145) == 0, true)
  check.close(blues / reds, 0.2 / 0.15, 0.05, "to ends at 0.35")
end)

check.test("time of a prompt and of tokens, and what was waited for", function()
  local work = dist.workload.open { length = 8, width = 32, layers = 2, heads = 2, rows = 4, chapters = 20,
    vocabulary = 300 }
  local got = dist.run(2, function(group, given)
    local d = require "tycho.dist"
    local model = d.workload.model(given, 1):eval()
    d.tensor_parallel(model, group)
    model.model.layers[1].mlp:register_forward_pre_hook(function() group:advance(1) end)
    return d.decoding.measure(group, model, given.held_out:narrow(1, 0, 8):contiguous(), { tokens = 3, rounds = 2 })
  end, { latency = 0.01 }, work)[1]
  -- Five sums and the logits, which take two messages and one.
  check.close(got.prefill, 1.11, 0.05)
  check.close(got.decode, 1.11, 0.05)
  check.close(got.whole, got.prefill + 3 * got.decode, 1e-9)
  local function cost() return 0.02 end
  check.close(dist.decoding.unwaited(got.events, cost), 0, 0.05)
  local computes, flies = dist.decoding.rows("x", got.events, cost)
  check.equal({ #computes.bars, #flies.bars, flies.label }, { 20, 20, "x: sums on their way" })
  check.close(flies.bars[2][2] - flies.bars[2][1], 0.02, 0.005)
end)

check.test("arguments", function()
  check.fails(function() dist.timeline({ { bars = {} } }) end, "rows[1].label: expected a string")
  check.fails(function() dist.timeline({ { label = "a", bars = { { 1 } } } }) end, "expected { from, to } in seconds")
  check.fails(function() dist.decoding.measure(1) end, "group: expected a group")
end)

check.finish()
