-- The page for those who come from PyTorch (docs/pytorch.md): up to date, and as many names as are promised.

local here = arg[0]:match(".*/") or "./"
local check = dofile(here .. "check.lua")
local ty = require "tycho"

check.test("docs/pytorch.md is what docs/make_pytorch.lua writes, and says why names are left out", function()
  local page = dofile(here .. "../../docs/make_pytorch.lua")
  local text, share = page(here .. "../../docs/")
  check.ok(text == ty.io.read(here .. "../../docs/pytorch.md"), "out of date: tycho docs/make_pytorch.lua")
  check.ok(share >= 0.85, ("%.3f are there"):format(share))
end)

check.finish()
