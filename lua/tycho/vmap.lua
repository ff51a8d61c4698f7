--- ty.vmap: a function of single samples called on a batch of them at once. The ops inside run by rules
-- (src/ops/vmap.h), not in a loop; what is here takes arguments apart and puts results together.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local native = ty.core.vmap_core
local expect, fail, describe = arguments.expect, arguments.fail, arguments.describe

local defaults = { in_dims = 0, out_dims = 0, randomness = "error", chunk_size = math.huge }
local kinds = {
  in_dims = "an integer or a boolean or a table", out_dims = "an integer or a table",
  randomness = '"error" or "different" or "same"', chunk_size = "a number >= 1",
}

-- ---- arguments ----

local function is_plain(value) return type(value) == "table" and getmetatable(value) == nil end

-- The dimension of x that `dim` names, from 0.
local function dim_of(what, dim, x)
  local n = x.ndim
  if math.type(dim) ~= "integer" or dim < -n or dim >= n then
    fail("vmap: %s: expected a dimension of %s, got %s", what, describe(x), describe(dim))
  end
  return dim < 0 and dim + n or dim
end

-- Whether a tensor is anywhere in a value.
local function has_tensor(value)
  if ty.is_tensor(value) then return true end
  if not is_plain(value) then return false end
  for _, item in pairs(value) do
    if has_tensor(item) then return true end
  end
  return false
end

-- Calls visit(tensor, dim, where) for each tensor of a value that has a batch dimension, and returns the value with
-- what that gives in their places.
local function each_tensor(value, dims, where, visit)
  if dims == false or dims == nil then return value end
  if ty.is_tensor(value) then return visit(value, dim_of(where, dims, value), where) end
  if not is_plain(value) or not has_tensor(value) then
    if type(dims) == "table" then fail("%s: expected no dims for %s", "vmap: " .. where, describe(value)) end
    return value
  end
  local result = {}
  for key, item in pairs(value) do
    local dim = dims
    if type(dims) == "table" then dim = dims[key] end
    result[key] = each_tensor(item, dim, where .. "[" .. tostring(key) .. "]", visit)
  end
  return result
end

-- in_dims by argument.
local function dims_of_arguments(in_dims, count)
  local list = {}
  for i = 1, count do
    if type(in_dims) == "table" then list[i] = in_dims[i] or false
    else list[i] = in_dims end
  end
  if type(in_dims) == "table" then
    for key in pairs(in_dims) do
      if math.type(key) ~= "integer" or key < 1 or key > count then
        fail("vmap: in_dims: expected a list with a dimension, or false, for each of %d arguments, got a key %s", count,
          tostring(key))
      end
    end
  end
  return list
end

-- The size of the batch, on which all have to agree.
local function batch_of(packed, dims)
  local size, first
  for i = 1, packed.n do
    each_tensor(packed[i], dims[i], "argument " .. i, function(x, dim, where)
      local n = x.shape[dim + 1]
      if size and n ~= size then
        fail("vmap: %s: expected %d samples in dimension %d, like %s, got %s", where, size, dim, first, describe(x))
      end
      size, first = n, first or where
      return x
    end)
  end
  if not size then fail("vmap: expected a tensor among the arguments that has a batch dimension, got none") end
  return size
end

-- ---- results ----

local function out_dim_of(out_dims, i)
  if type(out_dims) ~= "table" then return out_dims end
  local dim = out_dims[i]
  if math.type(dim) ~= "integer" then
    fail("vmap: out_dims: expected an integer for each result, got %s for result %d", describe(dim), i)
  end
  return dim
end

local function leave(value, dim, level, where)
  if ty.is_tensor(value) then
    local whole = native.leave(value, level)
    return dim == 0 and whole or whole:movedim(0, dim_of("out_dims", dim, whole))
  end
  if not is_plain(value) then fail("vmap: fn: expected it to return tensors, got %s as %s", describe(value), where) end
  local result = {}
  for key, item in pairs(value) do result[key] = leave(item, dim, level, where .. "[" .. tostring(key) .. "]") end
  return result
end

-- fn once, on all samples of the arguments.
local function mapped(fn, packed, dims, size, options)
  local level <close> = native.open(size, options.randomness)
  local samples = { n = packed.n }
  for i = 1, packed.n do
    samples[i] = each_tensor(packed[i], dims[i], "argument " .. i, function(x, dim)
      return native.enter(dim == 0 and x or x:movedim(dim, 0), level)
    end)
  end
  local results = table.pack(fn(table.unpack(samples, 1, samples.n)))
  for i = 1, results.n do
    results[i] = leave(results[i], out_dim_of(options.out_dims, i), level, "result " .. i)
  end
  return results
end

-- The parts' results, one behind the other.
local function joined(parts, dim)
  if ty.is_tensor(parts[1]) then return ty.concat(parts, dim) end
  local result = {}
  for key in pairs(parts[1]) do
    local items = {}
    for i, part in ipairs(parts) do items[i] = part[key] end
    result[key] = joined(items, dim)
  end
  return result
end

local function in_chunks(fn, packed, dims, size, options)
  local parts = {}
  for start = 0, size - 1, options.chunk_size do
    local n = math.min(options.chunk_size, size - start)
    local chunk = { n = packed.n }
    for i = 1, packed.n do
      chunk[i] = each_tensor(packed[i], dims[i], "argument " .. i, function(x, dim) return x:narrow(dim, start, n) end)
    end
    parts[#parts + 1] = mapped(fn, chunk, dims, n, options)
  end
  local results = { n = parts[1].n }
  for i = 1, results.n do
    local items = {}
    for j, part in ipairs(parts) do items[j] = part[i] end
    results[i] = joined(items, out_dim_of(options.out_dims, i))
  end
  return results
end

--- fn, which is written for a single sample, as a function of a batch: every op inside runs once, for all samples.
-- Tensors that do not come as arguments are the same for all. It composes with ty.vjp, ty.jvp, ty.jacobian, ty.grad and
-- itself: the gradient of each sample of a batch is
--
--     local function gradient(w, x, t) return select(2, ty.vjp(function(p) return loss(p, x, t) end, w)) end
--     local grads = ty.vmap(gradient, { in_dims = { false, 0, 0 } })(w, inputs, targets)
--
-- and an ensemble is ty.vmap over parameters that are stacked, with ty.functional_call. Values (item, tolist) differ by
-- sample inside and cannot steer Lua; ops whose result has a size that depends on values, and a few without a rule, are
-- refused by name. After the idea of torch.func.vmap and jax.vmap.
---@param fn fun(...): ...  of tensors, tables of tensors, and other values; returns tensors, or tables of them
---@param options? {in_dims: any, out_dims: integer|integer[], randomness: string, chunk_size: integer}
-- in_dims: the batch dimension (0) of each argument, a list where they differ, false for one without; for an argument
-- that is a table, a table by its keys or one for all. out_dims: where it is in the results (0). randomness: what ops
-- that draw do, "error", "different" numbers for each sample, the "same" for all. chunk_size: so many samples at once.
---@return fun(...): ...
local function vmap(fn, options)
  expect("vmap", "fn", fn, "a function")
  options = arguments.read("vmap", options, defaults, kinds)
  return function(...)
    local packed = table.pack(...)
    local dims = dims_of_arguments(options.in_dims, packed.n)
    local size = batch_of(packed, dims)
    local whole = size <= options.chunk_size or size == 0
    local results = (whole and mapped or in_chunks)(fn, packed, dims, size, options)
    return table.unpack(results, 1, results.n)
  end
end

return { vmap = vmap }
