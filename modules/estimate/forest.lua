--- Random forests for regression: means of trees, each grown on rows drawn with replacement and, at every node, on a
-- part of the features. Breiman 2001, "Random Forests".
--
--     local forest = estimate.forest(x, y, { trees = 100, seed = 1 })
--     local guess = forest:predict(new)          -- [m, features] to [m]
--
-- Growing is Lua over a few thousand rows; a prediction is a handful of ops for all rows and trees at once.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local none = arguments.none

--- Made by estimate.forest. Nodes of all trees lie one after the other; a leaf leads to itself.
---@class Forest
---@field trees integer
---@field features integer    numbers of a row
---@field depth integer       of the deepest tree
---@field importance number[] of each feature: its share of what splits took from the squared error
---@field nodes table<string, Tensor>  feature, left, right i64, threshold, value f64, and root i64 [trees]
local Forest = {}
Forest.__index = Forest
Forest.__name = "Forest"

function Forest:__tostring()
  return ("Forest of %d trees of depth %d over %d features"):format(self.trees, self.depth, self.features)
end

-- ---- numbers drawn by a seed: xorshift64* ----

local function generator(seed)
  local state = (seed * 0x9E3779B97F4A7C15 ~ 0x2545F4914F6CDD1D) | 1
  return function(n) -- an integer in [1, n]
    state = state ~ (state >> 12)
    state = state ~ (state << 25)
    state = state ~ (state >> 27)
    return (state * 0x2545F4914F6CDD1D >> 33) % n + 1
  end
end

-- ---- columns in bins ----

-- Up to `bins` - 1 thresholds between the values of a column, and the bin of every row, from 1.
local function cut(column, bins)
  local sorted, distinct = table.move(column, 1, #column, 1, {}), {}
  table.sort(sorted)
  for _, v in ipairs(sorted) do if v ~= distinct[#distinct] then distinct[#distinct + 1] = v end end
  local thresholds = {}
  if #distinct <= bins then
    for i = 1, #distinct - 1 do thresholds[i] = (distinct[i] + distinct[i + 1]) / 2 end
  else -- at equal shares of the rows
    for i = 1, bins - 1 do
      local at = i * #sorted // bins
      local below, above = sorted[at], sorted[at + 1]
      if below < above and (below + above) / 2 ~= thresholds[#thresholds] then
        thresholds[#thresholds + 1] = (below + above) / 2
      end
    end
  end
  local codes = {}
  for i, v in ipairs(column) do
    local low, high = 1, #thresholds + 1 -- the first threshold that is not below v
    while low < high do
      local middle = (low + high) // 2
      if v <= thresholds[middle] then high = middle else low = middle + 1 end
    end
    codes[i] = low
  end
  return thresholds, codes
end

-- ---- one tree ----

-- The split of rows by feature f that takes most from the squared error: gain, bin.
local function best_split(rows, codes, y, count, least)
  local n, sums, counts = #rows, {}, {}
  for b = 1, count + 1 do sums[b], counts[b] = 0.0, 0 end
  local total = 0.0
  for i = 1, n do
    local row = rows[i]
    local b, v = codes[row], y[row]
    sums[b], counts[b], total = sums[b] + v, counts[b] + 1, total + v
  end
  local best, at, sum, below, whole = 0.0, nil, 0.0, 0, total * total / n
  for b = 1, count do
    sum, below = sum + sums[b], below + counts[b]
    if below >= least and n - below >= least and counts[b] > 0 then
      local gain = sum * sum / below + (total - sum) ^ 2 / (n - below) - whole
      if gain > best then best, at = gain, b end
    end
  end
  return best, at
end

-- Adds a tree's nodes to `out`; returns the number of its root, and its depth.
local function grow(rows, depth, data, o, draw, out)
  local number = #out.value + 1
  local sum = 0.0
  for _, row in ipairs(rows) do sum = sum + data.y[row] end
  out.value[number], out.feature[number], out.threshold[number] = sum / #rows, 0, 0.0
  out.left[number], out.right[number] = number - 1, number - 1
  if depth >= o.depth or #rows < 2 * o.least then return number, depth end
  -- Features in a drawn order, until enough of them could split.
  local order, tried, best, feature, bin = {}, 0, 1e-12, nil, nil
  for f = 1, data.features do order[f] = f end
  for i = 1, data.features do
    local j = i + draw(data.features - i + 1) - 1
    order[i], order[j] = order[j], order[i]
    local f = order[i]
    local gain, at = best_split(rows, data.codes[f], data.y, #data.thresholds[f], o.least)
    if at then tried = tried + 1 end
    if at and gain > best then best, feature, bin = gain, f, at end
    if tried == o.tries then break end
  end
  if not feature then return number, depth end
  local low, high, codes = {}, {}, data.codes[feature]
  for _, row in ipairs(rows) do
    if codes[row] <= bin then low[#low + 1] = row else high[#high + 1] = row end
  end
  out.feature[number], out.threshold[number] = feature - 1, data.thresholds[feature][bin]
  out.gains[feature] = out.gains[feature] + best
  local left, deep = grow(low, depth + 1, data, o, draw, out)
  local right, deeper = grow(high, depth + 1, data, o, draw, out)
  out.left[number], out.right[number] = left - 1, right - 1
  return number, math.max(deep, deeper)
end

-- ---- all of them ----

local function rows_of(who, what, value, ndim)
  if type(value) == "table" then value = ty.tensor(value, { dtype = "f64" }) end
  arguments.expect(who, what, value, "a tensor")
  if value.ndim ~= ndim or value:numel() == 0 then
    arguments.fail("%s: %s: expected %s, got %s", who, what, ndim == 2 and "[n, features]" or "[n]",
      arguments.describe(value))
  end
  value = value:detach():to { dtype = "f64", device = "cpu" }
  if not value:isfinite():all():item() then
    arguments.fail("%s: %s: expected finite numbers, got some that are not", who, what)
  end
  return value
end

local node_kinds = { feature = "i64", left = "i64", right = "i64", root = "i64", threshold = "f64", value = "f64" }

--- Grows a forest. options: trees (100), depth (16, at most), least (2: rows of a leaf), tries (of features at a node;
-- a third of them by default), bins (255: values of a feature that are told apart; above that, equal shares of rows),
-- bootstrap (true: rows of a tree are drawn with replacement; false: all of them), seed (0).
---@param x Tensor|number[][]  [n, features]
---@param y Tensor|number[]    [n]
---@param options? table
---@return Forest
local function fit(x, y, options)
  local who = "estimate.forest"
  x, y = rows_of(who, "x", x, 2), rows_of(who, "y", y, 1)
  local n, features = x.shape[1], x.shape[2]
  if y.shape[1] ~= n then
    arguments.fail("%s: y: expected a number for each of the %d rows, got %d", who, n, y.shape[1])
  end
  local o = arguments.read(who, options, { trees = 100, depth = 16, least = 2, tries = none, bins = 255,
    bootstrap = true, seed = 0 }, { trees = "an integer >= 1", depth = "an integer >= 0", least = "an integer >= 1",
    tries = "an integer >= 1", bins = "an integer >= 2", seed = "an integer" })
  o.tries = math.min(features, o.tries or math.max(1, features // 3))
  local data = { y = y:tolist(), features = features, thresholds = {}, codes = {} }
  for f = 1, features do
    data.thresholds[f], data.codes[f] = cut(x:select(1, f - 1):tolist(), o.bins)
  end
  local out, depth = { value = {}, feature = {}, threshold = {}, left = {}, right = {}, root = {}, gains = {} }, 0
  for f = 1, features do out.gains[f] = 0.0 end
  for tree = 1, o.trees do
    local draw, rows = generator(o.seed * 1000003 + tree), {}
    for i = 1, n do rows[i] = o.bootstrap and draw(n) or i end
    local root, deep = grow(rows, 0, data, o, draw, out)
    out.root[tree], depth = root - 1, math.max(depth, deep)
  end
  local sum, importance = 0.0, {}
  for _, gain in ipairs(out.gains) do sum = sum + gain end
  for f, gain in ipairs(out.gains) do importance[f] = sum > 0 and gain / sum or 0.0 end
  local nodes = {}
  for name, dtype in pairs(node_kinds) do nodes[name] = ty.keep(ty.tensor(out[name], { dtype = dtype })) end
  return setmetatable({ nodes = nodes, trees = o.trees, features = features, depth = depth, importance = importance },
    Forest)
end

--- The numbers of rows: the mean over the trees of the means of their leaves, f64 [m].
---@param x Tensor|number[][]  [m, features]
---@return Tensor
function Forest:predict(x) return self:each(x):mean(1) end

--- What every tree says of every row, f64 [m, trees].
---@param x Tensor|number[][]
---@return Tensor
function Forest:each(x)
  local who = "Forest:predict"
  x = rows_of(who, "x", x, 2)
  if x.shape[2] ~= self.features then
    arguments.fail("%s: x: expected [m, %d], got %s", who, self.features, arguments.describe(x))
  end
  local nodes, m, trees = self.nodes, x.shape[1], self.trees
  return ty.no_grad(function()
    local at = nodes.root:unsqueeze(0):expand { m, trees }:reshape(-1)
    for _ = 1, self.depth do
      local value = x:gather(1, nodes.feature:index_select(0, at):reshape(m, trees)):reshape(-1)
      at = ty.where(value:le(nodes.threshold:index_select(0, at)), nodes.left:index_select(0, at),
        nodes.right:index_select(0, at))
    end
    return nodes.value:index_select(0, at):reshape(m, trees)
  end)
end

--- What there is to write into a file: tensors by name.
---@return table<string, Tensor>
function Forest:state_dict()
  local state = { importance = ty.tensor(self.importance, { dtype = "f64" }),
    sizes = ty.tensor({ self.trees, self.features, self.depth }, { dtype = "i64" }) }
  for name, tensor in pairs(self.nodes) do state[name] = tensor end
  return state
end

--- A forest from such tensors; they may come from a file, and are checked.
---@param state table<string, Tensor>
---@return Forest
local function from_state(state)
  local who = "estimate.forest_from"
  arguments.expect(who, "state", state, "a table")
  for _, name in ipairs { "sizes", "importance", "feature", "left", "right", "root", "threshold", "value" } do
    arguments.expect(who, name, state[name], "a tensor")
    local dtype = node_kinds[name] or (name == "sizes" and "i64" or "f64")
    if state[name].dtype ~= dtype or state[name].ndim ~= 1 then
      arguments.fail("%s: %s: expected %s [n], got %s", who, name, dtype, arguments.describe(state[name]))
    end
  end
  local count = state.value:numel()
  if state.sizes:numel() ~= 3 or count == 0 then arguments.fail("%s: expected three sizes and nodes", who) end
  local trees, features, depth = table.unpack(state.sizes:tolist())
  local function within(name, numbers, limit)
    local t = state[name]
    if t:numel() ~= numbers or t:min():item() < 0 or t:max():item() >= limit then
      arguments.fail("%s: %s: expected %d numbers from 0 to %d", who, name, numbers, limit - 1)
    end
  end
  if trees < 1 or features < 1 or depth < 0 or depth > count then
    arguments.fail("%s: sizes: expected trees, features and a depth, got %d, %d, %d", who, trees, features, depth)
  end
  within("root", trees, count)
  within("left", count, count)
  within("right", count, count)
  within("feature", count, features)
  if state.threshold:numel() ~= count or state.importance:numel() ~= features then
    arguments.fail("%s: expected a threshold for each of %d nodes and a number for each of %d features", who, count,
      features)
  end
  local nodes = {}
  for name in pairs(node_kinds) do nodes[name] = ty.keep(state[name]) end
  return setmetatable({ nodes = nodes, trees = trees, features = features, depth = depth,
    importance = state.importance:tolist() }, Forest)
end

return { fit = fit, from_state = from_state }
