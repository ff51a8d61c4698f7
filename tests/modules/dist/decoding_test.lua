-- Time of decoding, and what ranks did meanwhile.
local here = arg and arg[0]:match ".*/" or "tests/modules/dist/"
local check = dofile(here .. "../../lua/check.lua")
local dist = require "tycho.dist"

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
  local rows = dist.decoding.rows(got.events, cost)
  check.equal({ #rows[1], #rows[2], rows[2][1].name }, { 20, 20, "sum" })
  check.close(rows[2][2].to - rows[2][2].from, 0.02, 0.005)
  check.equal(#dist.decoding.rows(got.events, cost, rows[2][3].from)[1], 2)
end)

check.test("arguments", function()
  check.fails(function() dist.decoding.measure(1) end, "group: expected a group")
end)

check.finish()
