-- Leverage scores: against a full singular value decomposition, and what they cannot depend on.
local here = arg and arg[0]:match ".*/" or "tests/modules/curation/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local leverage = require("tycho.curation").leverage

ty.manual_seed(1)
-- Samples along few directions, with little noise.
local x = ty.randn(300, 6, { dtype = "f64" }):matmul(ty.randn(6, 20, { dtype = "f64" }))
  + ty.randn(300, 20, { dtype = "f64" }) * 0.05 + 3
local function apart(a, b) return (a - b):abs():max():item() end

for _, options in ipairs { {}, { scale = false, unit = false }, { unit = false }, { part = 7 } } do
  check.test("scores are those of the full decomposition, and sum to k", function()
    local scores, k = leverage.scores(x, options)
    local y = x - x:mean({ 0 }, true)
    if options.scale ~= false then y = y / y:square():mean({ 0 }, true):sqrt() end
    if options.unit ~= false then y = y / y:square():sum({ 1 }, true):sqrt() end
    local u, s = y:svd()
    local squares, total, so_far, want = s:square():tolist(), s:square():sum():item(), 0, 0
    while so_far < 0.9 * total do
      want = want + 1
      so_far = so_far + squares[want]
    end
    check.equal(k, want)
    check.ok(k > 1 and k <= 6)
    check.ok(apart(scores, u:narrow(1, 0, k):square():sum { 1 }) < 1e-6)
    check.close(scores:sum():item(), k, 1e-9)
  end)
end

check.test("turning the prepared features changes nothing; duplicates score alike", function()
  local plain = { scale = false, unit = false }
  local turn = ty.randn(20, 20, { dtype = "f64" }):qr()
  check.ok(apart(leverage.scores(x, plain), leverage.scores(x:matmul(turn), plain)) < 1e-9)
  local twice = leverage.scores(ty.concat({ x, x:narrow(0, 10, 5) }, 0))
  check.ok(apart(twice:narrow(0, 10, 5), twice:narrow(0, 300, 5)) < 1e-12)
  -- A sample that lies alone in its direction is the first to be chosen.
  local alone = x:clone()
  alone:select(0, 42):fill_(0)
  alone:narrow(1, 3, 1):narrow(0, 42, 1):fill_(500)
  check.equal(leverage.select(alone, 0.01, plain):tolist()[1], 42)
end)

check.test("the largest are selected, in f32 as well", function()
  local positions, scores, k = leverage.select(x:to "f32", 0.16)
  check.equal({ positions.shape[1], k > 0 }, { 48, true })
  local list = scores:index_select(0, positions)
  check.ok(list:min():item() >= scores:sort(0, true):select(0, 47):item())
end)

check.test("what has no scores is one clear error", function()
  check.fails(function() leverage.scores(ty.ones(5, 3)) end, "expected samples that differ")
  check.fails(function() leverage.scores(ty.ones { 5 }) end, "expected a float tensor [samples, d]")
  check.fails(function() leverage.select(x, 2) end, "share: expected a number in [0, 1]")
end)

check.finish()
