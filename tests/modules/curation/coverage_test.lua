-- Samples next to the centres of k-means.
local here = arg and arg[0]:match ".*/" or "tests/modules/curation/"
local check = dofile(here .. "../../lua/check.lua")
local ty = require "tycho"
local coverage = require("tycho.curation").coverage

check.test("groups that lie apart have a sample each, the one next to their mean", function()
  local x = ty.concat({ ty.randn(20, 3) * 0.1, ty.randn(20, 3) * 0.1 + 5, ty.randn(20, 3) * 0.1 - 5 }, 0)
  for seed = 1, 20 do -- that begins in each of the groups
    ty.manual_seed(seed)
    local first, groups = ty.randperm(60):narrow(0, 0, 3):tolist(), {}
    for _, place in ipairs(first) do groups[place // 20] = true end
    if groups[0] and groups[1] and groups[2] then
      ty.manual_seed(seed)
      local chosen, centres = coverage.select(x, 3)
      local want, got = {}, chosen:sort(0):tolist()
      for g = 0, 2 do
        local part = x:narrow(0, g * 20, 20)
        want[g + 1] = (part - part:mean({ 0 }, true)):square():sum({ 1 }):argmin(0):item() + g * 20
      end
      check.equal(got, want)
      check.close(centres:sort(0):select(0, 2):tolist(), x:narrow(0, 20, 20):mean({ 0 }):tolist(), 1e-4)
      return
    end
  end
  check.ok(false, "no seed begins in all groups")
end)

check.test("as many centres as samples are the samples; duplicates are taken once", function()
  local x = ty.randn(7, 2)
  check.equal(coverage.select(x, 7):sort(0):tolist(), { 0, 1, 2, 3, 4, 5, 6 })
  check.equal(coverage.select(ty.ones(5, 2), 3):tolist(), { 0 })
  check.fails(function() coverage.select(x, 8) end, "count: expected at most the 7 samples, got 8")
  check.fails(function() coverage.select(ty.ones(5), 1) end, "expected a float tensor [samples, d]")
end)

check.finish()
