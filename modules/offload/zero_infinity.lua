-- ZeRO-Infinity on one device: parameters, gradients and moments over device, host and file; parameters are fetched
-- ahead in the order that the first pass recorded; a layer that is too large is a sequence of tiles whose weights come
-- and go (memory-centric tiling). Rajbhandari et al. 2021, "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme
-- Scale Deep Learning", sections 5.1.3 and 6.2. Its bandwidth-centric partition is one of ranks and not here.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local superpipeline = require "tycho.offload.superpipeline"
local within = require "tycho.offload.within"

local nn = ty.nn
local surgery = nn.surgery

local M = {}

--- Some rows of a linear layer.
local Tile = nn.module "LinearTile"

function Tile:init(weight, bias)
  self:parameter("weight", weight)
  if bias then self:parameter("bias", bias) end
end

function Tile:forward(x) return ty.linear(x, self.weight, self.bias) end

--- A linear layer as a sequence of tiles of its rows.
local TiledLinear = nn.module "TiledLinear"
TiledLinear._in_parts = true -- tycho.nn.units takes it apart

local function part(tensor, from, rows)
  local copy = tensor:detach():narrow(0, from, rows):clone()
  return tensor.requires_grad and copy:requires_grad_() or copy
end

function TiledLinear:init(linear, count)
  self.in_features, self.out_features, self.tiles = linear.in_features, linear.out_features, nn.ModuleList()
  local rows = (self.out_features + count - 1) // count
  for from = 0, self.out_features - 1, rows do
    local n = math.min(rows, self.out_features - from)
    self.tiles:append(Tile(part(linear.weight, from, n), linear.bias and part(linear.bias, from, n)))
  end
end

function TiledLinear:forward(x, residual, activation)
  local parts = {}
  for i, tile in ipairs(self.tiles) do parts[i] = tile(x) end
  return surgery.finish(ty.concat(parts, -1), residual, activation)
end

function TiledLinear:describe()
  return ("%d, %d in %d tiles"):format(self.in_features, self.out_features, #self.tiles)
end

-- How many modules have each parameter.
local function owners(model)
  local count = {}
  local names, modules = surgery.modules(model)
  for _, name in ipairs(names) do
    for _, key in ipairs(modules[name]._order) do
      local value = rawget(modules[name], key)
      if ty.is_tensor(value) then count[value] = (count[value] or 0) + 1 end
    end
  end
  return count
end

--- Makes tiles of every nn.Linear whose weight has more bytes than `bytes`, each of at most so many. The tiles are new
-- parameters: make the optimizer afterwards. A weight that two modules share stays whole.
---@param model Module
---@param options {bytes: integer}
---@return string[] names of the layers
function M.tile(model, options)
  arguments.expect("offload.tile", "model", model, "a module")
  local o = arguments.read("offload.tile", options, { bytes = arguments.none }, { bytes = "an integer >= 1" })
  if not o.bytes then arguments.fail "offload.tile: bytes: expected an integer >= 1, got nil" end
  local count, found = owners(model), {}
  for _, layer in ipairs(surgery.find("offload.tile", model, { kinds = { "linear" }, head = true })) do
    local linear = layer.module
    if getmetatable(linear) == nn.Linear and layer.name ~= "" and count[linear.weight] == 1
        and linear.weight:nbytes() > o.bytes then
      local rows = math.max(1, o.bytes // (linear.weight:nbytes() // linear.out_features))
      model:set(layer.name, TiledLinear(linear, (linear.out_features + rows - 1) // rows))
      found[#found + 1] = layer.name
    end
  end
  return found
end

--- Makes plain layers of the tiles again, with the weights that these have now.
---@param model Module
---@return string[] names of the layers
function M.untile(model)
  arguments.expect("offload.untile", "model", model, "a module")
  local found = {}
  local names, modules = surgery.modules(model)
  for _, name in ipairs(names) do
    local tiled = modules[name]
    if getmetatable(tiled) == TiledLinear and name ~= "" then
      local parts = { weight = {}, bias = {} }
      for i, tile in ipairs(tiled.tiles) do
        parts.weight[i], parts.bias[i] = tile.weight:detach(), tile.bias and tile.bias:detach()
      end
      local first = tiled.tiles[1]
      local rng = ty.rng_state()
      local linear = nn.Linear(tiled.in_features, tiled.out_features, { bias = first.bias ~= nil })
      ty.rng_state(rng)
      for key, list in pairs(parts) do
        if list[1] then
          local whole = ty.concat(list, 0)
          surgery.exchange(linear, key, first[key].requires_grad and whole:requires_grad_() or whole)
        end
      end
      model:set(name, linear)
      found[#found + 1] = name
    end
  end
  return found
end

--- A policy for offload.engine: that of superpipeline, for units that may be tiles. options: window (4), ahead (3),
-- within (false; true: the optimizer steps a tile within the backward pass, as soon as its gradients are whole, so that
-- moments move beside computing and not behind it; no clip_norm).
---@param options? {window?: integer, ahead?: integer, within?: boolean}
---@return table policy
function M.policy(options)
  local o = arguments.read("offload.zero_infinity", options, { window = 4, ahead = 3, within = false },
    { window = "an integer >= 1", ahead = "an integer >= 0" })
  local policy = superpipeline { window = o.window, ahead = o.ahead }
  return o.within and within(policy, o.ahead > 0) or policy
end

return M
