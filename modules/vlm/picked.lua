--- Layers of a decoder on some of the tokens: what tycho.vlm.mixture_of_depths and tycho.vlm.flashvid share. Tokens
-- keep the positions that they have among all, and a cache holds, layer by layer, the tokens that went through.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

--- The decoder of a model that sees.
---@param who string
---@param model Llava
---@return Decoder
function M.decoder(who, model)
  local decoder = ty.nn.is_module(model) and model.language_model
  if not ty.nn.is_module(decoder) or not decoder.model or not decoder.model.layers then
    arguments.fail("%s: model: expected a model that sees, with a decoder as language_model, got %s", who,
      arguments.describe(model))
  end
  return decoder
end

--- x [n, t, ...] at places i64 [n, k]: [n, k, ...].
---@param x Tensor
---@param places Tensor
---@return Tensor
function M.pick(x, places)
  local shape = x.shape
  local index = places
  for _ = 3, #shape do index = index:unsqueeze(-1) end
  local wide = { shape[1], places.shape[2] }
  for d = 3, #shape do wide[d] = shape[d] end
  return x:gather(1, index:expand(wide))
end
local pick = M.pick

-- The table of turns [t, d], or [n, 1, t, d] where positions differ by row, at the kept places: [n, 1, k, d].
local function pick_turns(x, places)
  if x.ndim == 2 then return ty.embedding(x, places):unsqueeze(1) end
  return pick(x:squeeze(1), places):unsqueeze(1)
end

-- The mask [n, 1, 1, t] or [n, 1, t, t] among the kept places.
local function pick_mask(mask, places)
  local x = mask:squeeze(1):to "u8" -- [n, 1 or t, t]
  if x.shape[2] > 1 then x = pick(x, places) end
  return pick(x:transpose(1, 2), places):transpose(1, 2):to("bool"):unsqueeze(1)
end

--- Runs a layer on the tokens that come after a prompt, all of which go through and see what the layer holds.
---@param layer Module
---@param forward function  of the layer, as it was
---@return Tensor stream
---@return Tensor? more
function M.follow(layer, forward, stream, more, at)
  local cache = at.cache
  local places = cache[at.layer].places
  if not places then return forward(layer, stream, more, at) end
  local inner, t = setmetatable({}, { __index = at }), at.tokens.shape[2]
  local new = ty.arange(cache.past, cache.past + t, { device = places.device }):expand(places.shape[1], t)
  places = ty.unscoped(ty.concat, { places:narrow(1, 0, cache:held()[at.layer]), new }, 1)
  cache[at.layer].places = places
  if at.mask then inner.mask = pick_mask(at.mask, places) end
  return forward(layer, stream, more, inner)
end

--- Runs a layer on the tokens of x [n, t, hidden] at places i64 [n, k] of a prompt, in their order. Returns what it
-- gives for them, stream and what is to be added to it, [n, k, hidden] each.
---@param who string        the method, in errors
---@param layer Module
---@param forward function  of the layer, as it was
---@param x Tensor
---@param places Tensor
---@param at table
---@return Tensor stream
---@return Tensor more
function M.through(who, layer, forward, x, places, at)
  if at.cu_seqlens or at.bias then
    arguments.fail("%s: expected a mask at most, got %s", who, at.bias and "biased scores" or "cu_seqlens")
  end
  local cache = at.cache
  local inner = { cos = pick_turns(at.cos, places), sin = pick_turns(at.sin, places), interleaved = at.interleaved,
    mask = at.mask and pick_mask(at.mask, places), tokens = at.tokens, layer = at.layer, cache = cache,
    record = at.record }
  if cache then
    cache:skip(at.layer, x.shape[2] - places.shape[2])
    cache[at.layer].places = ty.unscoped(ty.clone, places)
  end
  return forward(layer, pick(x, places), nil, inner)
end

--- x [n, t, hidden] with y [n, k, hidden] in the place of its tokens at places i64 [n, k].
---@param x Tensor
---@param places Tensor
---@param y Tensor
---@return Tensor
function M.put(x, places, y)
  local shape = y.shape
  return x:scatter(1, places:unsqueeze(-1):expand(shape[1], shape[2], shape[3]), y)
end

return M
