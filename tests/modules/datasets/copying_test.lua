-- The copying memory task: what sequences are made of, seeds, the generator, shares of models whose answers are known,
-- mistakes.
local check = dofile((arg[0]:match ".*/" or "./") .. "../../lua/check.lua")
local ty = require "tycho"
local copying = require("tycho.datasets").copying

check.test("symbols, a gap, what asks for them, and blanks where they are wanted", function()
  for _, noise in ipairs { false, true } do
    local tokens, wanted = copying.draw(20, 30, { seed = 2, noise = noise })
    check.equal({ tokens.dtype, tokens.shape, wanted.shape }, { "i64", { 20, 50 }, { 20, 10 } })
    local symbols = {}
    for i, row in ipairs(tokens:tolist()) do
      for k = 1, 10 do
        check.equal(row[k], wanted:tolist()[i][k])
        check.ok(row[k] >= 0 and row[k] < copying.symbols)
        check.equal(row[40 + k], 8)
      end
      for k = 11, 39 do
        if noise then
          check.ok(row[k] >= 0 and row[k] < copying.symbols)
          symbols[row[k]] = true
        else
          check.equal(row[k], 8)
        end
      end
      check.equal(row[40], 9)
    end
    check.equal(#symbols, noise and 7 or 0)
  end
  check.equal(copying.draw(1, 1):tolist()[1][11], 9, "a gap of one asks")
end)

check.test("sequences depend on the seed alone, and the generator is left as it was", function()
  local function draw(seed) return (copying.draw(3, 20, { seed = seed, noise = true })) end
  check.equal({ draw(1):equal(draw(1)), draw(1):equal(draw(2)) }, { true, false })
  ty.manual_seed(9)
  local want = ty.randn(3):tolist()
  ty.manual_seed(9)
  draw(4)
  check.equal(ty.randn(3):tolist(), want)
end)

check.test("shares of what is recalled", function()
  local tokens, wanted = copying.draw(23, 15, { seed = 1 })
  -- Knows the first `known` symbols of each sequence, and says what is no symbol for the others.
  local function knows(known)
    return function(x)
      local t, said = x.shape[2], ty.full({ x.shape[1], x.shape[2] }, 9, { dtype = "i64" })
      said:narrow(1, t - 10, known):copy_(x:narrow(1, 0, known))
      return ty.one_hot(said, 10):to "f32"
    end
  end
  check.close(copying.share(knows(10), tokens, wanted), 1, 1e-9)
  check.close(copying.share(knows(3), tokens, wanted), 0.3, 1e-9)
  check.equal(copying.answers(ty.zeros(2, 35, 10)).shape, { 2, 10, 10 })
end)

check.test("mistakes", function()
  check.fails(function() copying.draw(0, 5) end, "datasets.copying.draw: n: expected an integer >= 1")
  check.fails(function() copying.draw(1, 0) end, "datasets.copying.draw: gap: expected an integer >= 1")
  check.fails(function() copying.draw(1, 5, { noise = 1 }) end, "noise: expected a boolean")
  local tokens, wanted = copying.draw(2, 5)
  check.fails(function() copying.share(function() end, tokens, wanted) end, "model: expected it to give a tensor")
  check.fails(function() copying.share(function(x) return x end, tokens, wanted:narrow(0, 0, 1)) end,
    "expected tokens %[n, t%] and wanted %[n, 10%]")
  check.fails(function() copying.share(1, tokens, wanted) end, "model: expected a function")
  check.fails(function() copying.answers(ty.zeros(2, 5, 8)) end, "logits: expected .* of at least 10 positions")
end)

check.finish()
