--- Tycho: deep learning in Lua. `local ty = require "tycho"` gives the core (tensors, ops, gradients, files) and the
-- library on top of it; the parts ty.nn, ty.optim, ty.data, ty.train, ty.plot and ty.recipe are loaded when first used.

-- First of all, since the native library of another Lua cannot be loaded. This file stays readable for every Lua from
-- 5.1 on, for that message's sake.
if _VERSION ~= "Lua 5.4" then
  local jit = rawget(_G, "jit")
  error("Tycho needs Lua 5.4, this is " .. (jit and jit.version or _VERSION), 3) -- at the line with require
end

local core = require "tycho.core"

local ty = {}
for name, value in pairs(core) do ty[name] = value end
ty.core = core
package.loaded["tycho"] = ty -- the parts require it while they load
require "tycho.searcher" -- tycho.X of modules/X in the source tree

ty.load, ty.save = core.io.load, core.io.save

local dtypes = {}
for name in ("f64 f32 f16 bf16 i64 i32 i16 i8 u8 bool"):gmatch "%S+" do dtypes[name] = true end

--- Whether `name` is the name of a dtype.
function ty.is_dtype(name) return dtypes[name] == true end

local methods = core.Tensor.methods

--- Whether the tensor's numbers are f64, f32, f16 or bf16.
function methods.is_floating_point(x)
  if not core.is_tensor(x) then require("tycho.arguments").expect("is_floating_point", "x", x, "a tensor") end
  local dtype = x.dtype
  return dtype:sub(1, 1) == "f" or dtype == "bf16"
end
ty.is_floating_point = methods.is_floating_point

local function finish(thread, ok, ...)
  if ok then return ... end
  coroutine.close(thread)
  error((...), 0)
end

--- Calls fn(...) outside of every scope that is open, and returns what it returns: tensors made inside live until Lua
-- drops them, as a cache needs that is filled within the steps of a loop. Scopes belong to a coroutine, and fn runs in
-- a new one.
function ty.unscoped(fn, ...)
  if type(fn) ~= "function" then
    local callable = require("tycho.arguments").expect("unscoped", "fn", fn, "a function")
    fn = function(...) return callable(...) end
  end
  local thread = coroutine.create(fn)
  return finish(thread, coroutine.resume(thread, ...))
end

for name, fn in pairs(require "tycho.views") do
  ty[name], methods[name] = fn, fn
end
for name, fn in pairs(require "tycho.grids") do ty[name] = fn end

for _, part in ipairs { "tycho.familiar", "tycho.familiar_maths", "tycho.familiar_linalg",
  "tycho.familiar_inplace" } do
  local familiar = require(part)
  for name, op in pairs(familiar.others) do ty[name], methods[name] = core[op], methods[op] end
  for name, fn in pairs(familiar.functions) do ty[name], methods[name] = fn, fn end
  for name, fn in pairs(familiar.methods) do methods[name] = methods[name] or fn end -- not over twins of the table
  for name, fn in pairs(familiar.of_ty or {}) do ty[name] = fn end
end

local parts = {
  nn = "tycho.nn", optim = "tycho.optim", data = "tycho.data", train = "tycho.train", plot = "tycho.plot",
  recipe = "tycho.recipe", stats = "tycho.stats", checkpoint = "tycho.checkpoint", custom_op = "tycho.custom_op",
  gradcheck = "tycho.gradcheck",
  tokenizer = "tycho.tokenizer", profile = "tycho.profile", energy = "tycho.energy",
  footprint = "tycho.footprint", sparse = "tycho.sparse",
}
-- Functions of parts that have several.
local members = { compile = "tycho.compile", graph = "tycho.compile", fuse = "tycho.compile" }
for name in ("vjp jvp jacobian hessian functional_call"):gmatch "%S+" do members[name] = "tycho.functional" end
members.vmap = "tycho.vmap"

local names = {}
for name in pairs(parts) do names[#names + 1] = name end
for name in pairs(members) do names[#names + 1] = name end
table.sort(names)

-- What an error about a name that tensors do not have ends with, or nil: asked by src/lua/index.c.
methods.__instead = function(name)
  local known = require("tycho.pytorch").instead("tensor", name)
  if known then return known end
  local found, value = pcall(function() return ty.nn[name] end)
  return found and type(value) == "function" and ("; there is ty.nn.%s"):format(name) or nil
end

-- ty.grad of a function, for src/lua/autograd.c.
methods.__grad = function(fn, at) return require("tycho.functional").grad(fn, at) end

-- What to write instead of a name that is not there: the same name in a part, or what is spelt nearly so.
local function instead(self, name)
  local known = require("tycho.pytorch").instead("ty", name)
  if known then return known end
  for _, part in ipairs { "nn", "optim", "data", "train", "io", "sparse" } do
    local found, value = pcall(function() return self[part][name] end)
    if found and value ~= nil then return ("; there is ty.%s.%s"):format(part, name) end
  end
  return core.nearest(name, self, names)
end

return setmetatable(ty, {
  __names = names, -- for completion and help: what is there but not loaded yet
  __index = function(self, name)
    local part = parts[name] or members[name]
    if not part and type(name) ~= "string" then return nil end
    if not part then error(("ty has no op or part '%s'%s"):format(name, instead(self, name)), 2) end
    local value = require(part)
    if members[name] then value = value[name] end
    rawset(self, name, value)
    return value
  end,
})
