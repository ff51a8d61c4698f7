--- How much of the attention to a text goes to some of its tokens, seen while a network runs: layers of the name
-- `attn2` (diffusers' for attention to a context) leave their maps in a list. No file of a network knows of it.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn
local M = {}

local watched = nn.surgery.wrapper { name = "Watched", field = "_watched", forward = function(base)
  return function(self, x, context, ...)
    local state = self._watched
    if state.positions and context then
      local q, k = nn.split_heads(self.to_q(x), self.heads), nn.split_heads(self.to_k(context), self.heads)
      local shares = (q:matmul(k:transpose(-2, -1)) * q.shape[4] ^ -0.5):softmax(-1)
      local n, s = state.positions.shape[1], state.positions.shape[2]
      local seen = shares * state.positions:to(shares.dtype):reshape(n, 1, 1, s)
      table.insert(state.seen, ty.is_grad_enabled() and seen or ty.keep(seen)) -- blocks give back what they made
    end
    return base.forward(self, x, context, ...)
  end
end }

--- Has the layers of a network leave their attention to some tokens in state.seen, as often as they run while
-- state.positions is there: a list of [n, heads, places, tokens], 0 at other tokens. state: positions (bool [n,
-- tokens]; nil: nothing is looked at), seen (a list). Returns what unwatch() takes.
---@param network Module
---@param state { positions?: Tensor, seen: Tensor[] }
---@return Module[] layers
function M.watch(network, state)
  arguments.expect("cross.watch", "network", network, "a module")
  arguments.expect("cross.watch", "state", state, "a table")
  local list = {}
  local names, modules = nn.surgery.modules(network)
  for _, name in ipairs(names) do
    if nn.surgery.ends_in(name, "attn2") then list[#list + 1] = watched:wrap(modules[name], state) end
  end
  if #list == 0 then
    arguments.fail("cross.watch: network: expected one with layers of the name attn2, which attend to a text, got %s",
      arguments.describe(network))
  end
  return list
end

--- The layers as they were.
---@param layers Module[]
function M.unwatch(layers)
  arguments.expect("cross.unwatch", "layers", layers, "a list of modules")
  for _, module in ipairs(layers) do watched:unwrap(module) end
end

--- fn() with the layers watched, and what it returns first.
---@param network Module
---@param state table
---@param fn function
---@return any
function M.with(network, state, fn)
  arguments.expect("cross.with", "fn", fn, "a function")
  local layers = M.watch(network, state)
  local ok, result = pcall(fn)
  M.unwatch(layers)
  if not ok then error(result, 0) end
  return result
end

--- What was seen as one map over places, [n, 1, height, width], from 0 where the least of a sample's attention goes to
-- the tokens to 1 where most does: the mean over heads, tokens and layers, layers with fewer places (a square of them)
-- brought to that size.
---@param seen Tensor[]  as state.seen has it
---@param height integer
---@param width integer
---@return Tensor
function M.map(seen, height, width)
  arguments.expect("cross.map", "seen", seen, "a list of tensors")
  arguments.expect("cross.map", "height", height, "an integer >= 1")
  arguments.expect("cross.map", "width", width, "an integer >= 1")
  if #seen == 0 then arguments.fail("cross.map: seen: expected at least one map, got none") end
  local sum
  for i, shares in ipairs(seen) do
    if shares.ndim ~= 4 then
      arguments.fail("cross.map: seen[%d]: expected [n, heads, places, tokens], got %s", i, arguments.describe(shares))
    end
    local places = shares.shape[3]
    -- As many rows to columns as the map that is asked for has.
    local rows = math.max(1, math.floor((places * height / width) ^ 0.5 + 0.5))
    if places % rows ~= 0 then
      arguments.fail("cross.map: seen[%d]: expected places that make %d rows to %d columns, got %d", i, height, width,
        places)
    end
    local one = shares:sum(-1):mean(1):reshape(shares.shape[1], 1, rows, places // rows)
    if rows ~= height or places // rows ~= width then
      one = one:interpolate({ height, width }, nil, "bilinear", false)
    end
    sum = sum and sum + one or one
  end
  local low, high = sum:amin({ 2, 3 }, true), sum:amax({ 2, 3 }, true)
  return (sum - low) / (high - low):clamp(1e-12)
end

return M
