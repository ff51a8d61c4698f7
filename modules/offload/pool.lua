-- Buffers for what comes and goes: one piece of memory, taken before the first step and as large as the plan says, in
-- parts of which each holds one tensor at a time. A part is free when nobody has its memory any more, a graph's view
-- included, which the count of those that have it says.
local ty = require "tycho"

local tier = ty.core.tier_core
local block = 4096

--- Memory for tensors of known sizes.
---@class OffloadPool
---@field bytes integer    of all parts
---@field memory integer   bytes that were taken for them
---@field taken integer    bytes of the tensors that are in parts
---@field most integer     the most there were
local Pool = {}
Pool.__index = Pool

local function blocks(nbytes) return math.max(1, (nbytes + block - 1) // block) * block end

--- The least power of two that is not below n: what allocators of page-locked memory take.
---@param n integer
---@return integer
function Pool.power(n)
  local p = 1
  while p < n do p = p * 2 end
  return p
end

--- Makes the parts: counts[nbytes] of each size. round: from the bytes of all to those that are taken.
---@param counts table<integer, integer>
---@param round? fun(bytes: integer): integer
---@return OffloadPool
function Pool.new(counts, round)
  local sizes, bytes, merged = {}, 0, {}
  for nbytes, count in pairs(counts) do merged[blocks(nbytes)] = (merged[blocks(nbytes)] or 0) + count end
  for size, count in pairs(merged) do
    sizes[#sizes + 1] = size
    bytes = bytes + size * count
  end
  table.sort(sizes)
  local self = setmetatable({ sizes = sizes, parts = {}, bytes = bytes, memory = math.max(block,
    round and round(bytes) or bytes), most = 0 }, Pool)
  local at, whole = 0, ty.keep(tier.pages(self.memory))
  for _, size in ipairs(sizes) do
    self.parts[size] = {}
    for i = 1, merged[size] do
      self.parts[size][i] = { memory = ty.keep(tier.slice(whole, at, size)), nbytes = 0 }
      at = at + size
    end
  end
  self.whole = whole
  return self
end

--- All of the parts as one tensor of a dtype, zero where nothing was written yet.
---@param dtype string
---@return Tensor
function Pool:flat(dtype)
  local one = ty.empty({ 1 }, { dtype = dtype, device = "meta" })
  return tier.lay(self.whole, ty.empty({ self.bytes // one:nbytes() }, { dtype = dtype, device = "meta" }))
end

local function is_free(part)
  local _, _, _, refs = tier.memory_of(part.memory)
  return refs == 1
end

--- Whether there are parts for tensors of these bytes.
---@param like Tensor
---@return boolean
function Pool:fits(like) return self.parts[blocks(like:nbytes())] ~= nil end

--- A tensor of a shape and dtype on a part of the smallest size that holds it: those of larger ones are for others.
-- Raises when none of them is free.
---@param like Tensor
---@return Tensor
function Pool:take(like)
  local nbytes, taken, fitting, chosen = like:nbytes(), 0, nil, nil
  for _, size in ipairs(self.sizes) do
    if size >= nbytes then fitting = fitting or size end
    for _, part in ipairs(self.parts[size]) do
      if not is_free(part) then taken = taken + part.nbytes
      elseif not chosen and size == fitting then chosen = part end
    end
  end
  if not chosen then
    error(("offload: no buffer of %d bytes is free, of a pool of %d bytes"):format(nbytes, self.bytes), 0)
  end
  chosen.nbytes = nbytes
  self.most = math.max(self.most, taken + nbytes)
  return tier.lay(chosen.memory, like)
end

return Pool
