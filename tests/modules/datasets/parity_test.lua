-- Parities of random bits: against a loop, seeds, the generator, scores of models whose answers are known, mistakes.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local parity = require "tycho.datasets".parity

check.test("parities are those of a loop", function()
  local bits, odd = parity.draw(5, 40, { seed = 3 })
  check.equal({ bits.dtype, odd.dtype, bits.shape }, { "i64", "i64", { 5, 40 } })
  local want, ones = {}, 0
  for i, row in ipairs(bits:tolist()) do
    want[i] = {}
    local state = 0
    for k, bit in ipairs(row) do
      check.ok(bit == 0 or bit == 1)
      state, ones = state ~ bit, ones + bit
      want[i][k] = state
    end
  end
  check.equal(odd:tolist(), want)
  check.ok(ones > 70 and ones < 130, ones)
end)

check.test("bits depend on the seed alone, and the generator is left as it was", function()
  local a, b, c = parity.draw(4, 32, { seed = 1 }), parity.draw(4, 32, { seed = 1 }), parity.draw(4, 32, { seed = 2 })
  check.equal({ a:equal(b), a:equal(c) }, { true, false })
  check.equal(parity.draw(4, 32):equal((parity.draw(4, 32, { seed = 0 }))), true)
  ty.manual_seed(9)
  local want = ty.randn(3):tolist()
  ty.manual_seed(9)
  parity.draw(2, 2, { seed = 5 })
  check.equal(ty.randn(3):tolist(), want)
end)

check.test("scores up to the length of the training and beyond it", function()
  -- Right for 8 positions, then the other answer always.
  local function until_eight(bits)
    local right = ty.remainder(ty.cumsum(bits, 1), 2)
    local answers = ty.concat({ right:narrow(1, 0, 8), 1 - right:narrow(1, 8, bits.shape[2] - 8) }, 1)
    return ty.stack({ 1 - answers, answers }, -1)
  end
  local function score(model, more)
    local options = { trained = 8, longest = 20, batch = 16 }
    for key, value in pairs(more or {}) do options[key] = value end
    return { parity.score(model, options) }
  end
  check.equal(score(until_eight), { 1.0, 0.0 })
  check.close(score(until_eight, { trained = 14 })[1], 8 / 14, 1e-6)
  check.close(score(until_eight, { trained = 4 })[2], 4 / 16, 1e-6)
  -- Batch i is that of the seed + i.
  local seen = {}
  score(function(bits)
    seen[#seen + 1] = bits:tolist()
    return until_eight(bits)
  end, { batches = 2, seed = 40 })
  check.equal(seen, { parity.draw(16, 20, { seed = 41 }):tolist(), parity.draw(16, 20, { seed = 42 }):tolist() })
end)

check.test("mistakes", function()
  check.fails(function() parity.draw(0, 3) end, "datasets.parity.draw: n: expected an integer >= 1, got 0")
  check.fails(function() parity.draw(3, 0.5) end, "datasets.parity.draw: length: expected an integer >= 1, got 0.5")
  check.fails(function() parity.draw(3, 3, { seed = "x" }) end, 'datasets.parity.draw: seed: expected an integer')
  check.fails(function() parity.score(3, {}) end, "datasets.parity.score: model: expected a function, got 3")
  check.fails(function() parity.score(type, {}) end, "trained: expected an integer >= 1, got nil")
  check.fails(function() parity.score(type, { trained = 8, longest = 8 }) end,
    "longest: expected more than the 8 bits of the training, got 8")
  check.fails(function() parity.score(type, { trained = 8, longest = 9 }) end, 'model: expected it to give a tensor')
end)

check.finish()
