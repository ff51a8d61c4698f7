--- Points in the plane for recipes of distillation: a distribution with sharp edges, a flow that draws it, and how far
-- drawn points are from it.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local diffusion = require "tycho.diffusion"
local models = require "tycho.models"

local expect = arguments.expect
local M = {}

--- Points drawn evenly from the eight dark cells of a 4 x 4 board over [-2, 2] x [-2, 2].
---@param n integer
---@return Tensor points  f32 [n, 2]
function M.checkerboard(n)
  expect("distill.points.checkerboard", "n", n, "an integer >= 1")
  local row, half = ty.randint(0, 4, { n }), ty.randint(0, 2, { n })
  local corner = ty.stack({ half * 2 + row % 2, row }, 1):to "f32" - 2
  return corner + ty.rand(n, 2)
end

local PARTS = 20 -- cells of a quarter, over [-2.5, 2.5]

--- How many points lie in each of 20 x 20 small cells over [-2.5, 2.5] x [-2.5, 2.5], as shares of all: f64 [20, 20],
-- rows from above, on the CPU.
---@param points Tensor  [n, 2]
---@return Tensor
function M.histogram(points)
  local who = "distill.points.histogram"
  expect(who, "points", points, "a tensor")
  if points.ndim ~= 2 or points.shape[2] ~= 2 or points.shape[1] == 0 then
    arguments.fail("%s: points: expected [n, 2] with n > 0, got %s", who, arguments.describe(points))
  end
  local at = ((points:to { dtype = "f64", device = "cpu" } + 2.5) * 4):floor()
  local inside = at:ge(0):logical_and(at:lt(PARTS)):all(1)
  local x, y = at:select(1, 0), at:select(1, 1)
  local cell = ty.where(inside, (PARTS - 1 - y) * PARTS + x, PARTS * PARTS):nan_to_num(PARTS * PARTS)
  local counts = ty.bincount(cell:to "i64", nil, PARTS * PARTS + 1)
  return counts:narrow(0, 0, PARTS * PARTS):reshape(PARTS, PARTS):to "f64" / points.shape[1]
end

--- Half the sum of absolute differences between the shares of drawn points in small cells and those of the board
-- itself: the share of the points that would have to move, 0 to 1. Points outside of the cells count in full.
---@param points Tensor  [n, 2]
---@return number
function M.off_board(points)
  local found = M.histogram(points)
  local i = ty.arange(PARTS)
  local cell = (i:to "f64" / 4 - 2.5):floor() -- from -3 (outside) to 2 (outside)
  local inside = cell:ge(-2):logical_and(cell:lt(2))
  local dark = ((cell:unsqueeze(0) + cell:flip(0):unsqueeze(1)) % 2):eq(0)
    :logical_and(inside:unsqueeze(0)):logical_and(inside:unsqueeze(1))
  local wanted = dark:to "f64" / (8 * 16)
  local outside = 1 - found:sum():item()
  return ((found - wanted):abs():sum():item() + outside) / 2
end

--- How densely points lie, as pictures for ty.plot.grid: f32 [sets, 1, 20, 20] from -1 to 1, rows from above, 1 where
-- points are as dense as on the board's dark cells by 10 / 7.
---@param sets Tensor[]  [n, 2] each
---@return Tensor
function M.densities(sets)
  expect("distill.points.densities", "sets", sets, "a list of tensors")
  local list = {}
  for k, x in ipairs(sets) do list[k] = (M.histogram(x) * (128 * 0.7)):clamp(0, 1):to "f32" * 2 - 1 end
  if #list == 0 then arguments.fail "distill.points.densities: sets: expected at least one, got none" end
  return ty.stack(list, 0):unsqueeze(1)
end

--- A flow of the checkerboard, trained with a seed, or read from the folder: its network, and the process that it was
-- trained with. options: steps (800), width (128), seed (0), device ("cpu").
---@param folder string
---@param options? { steps?: integer, width?: integer, seed?: integer, device?: string }
---@return TimeMLP model
---@return Process flow
function M.base(folder, options)
  local who = "distill.points.base"
  expect(who, "folder", folder, "a string")
  local o = arguments.read(who, options, { steps = 800, width = 128, seed = 0, device = "cpu" }, {
    steps = "an integer >= 1", width = "an integer >= 1", seed = "an integer" })
  local flow = diffusion.Flow { drop = 0 }
  local path = ("%s/points-%d-%d-%d.safetensors"):format(folder, o.width, o.steps, o.seed)
  return ty.data.with_seed(o.seed, function()
    return ty.train.kept(path, models.TimeMLP { width = o.width, places = 6 }:to(o.device), function(model)
      local loader = ty.data.DataLoader(ty.data.TensorDataset { x = M.checkerboard(100000) },
        { batch_size = 256, shuffle = true, seed = o.seed, device = o.device })
      local _, averaged = ty.train.fit(model, loader, { steps = o.steps, lr = 3e-3, final = 0.02, beta2 = 0.99,
        weight_decay = 0, average = 0.99, quiet = true, loss = function(m, batch) return flow:loss(m, batch.x) end })
      return averaged:requires_grad_()
    end)
  end), flow
end

--- Draws paths of points side by side, each set to the right of the one before. sets: for each its states, a list of
-- [n, 2] in the order of time, and a label. options: most (60: paths of a set), apart (7: from one to the next), and
-- those of ty.plot.line.
---@param sets { states: Tensor[], label?: string }[]
---@param options? table
---@return LinePlot
function M.paths(sets, options)
  local who = "distill.points.paths"
  expect(who, "sets", sets, "a list of tables")
  expect(who, "options", options, "a table or nil")
  local o = { most = 60, apart = 7 }
  for key, value in pairs(options or {}) do o[key] = value end
  expect(who, "most", o.most, "an integer >= 1")
  expect(who, "apart", o.apart, "a finite number")
  o.series = {}
  for k, set in ipairs(sets) do
    expect(who, ("states of set %d"):format(k), set.states, "a list")
    local x, y, lists = {}, {}, {}
    for s, state in ipairs(set.states) do
      expect(who, ("state %d of set %d"):format(s, k), state, "a tensor")
      lists[s] = state:tolist()
    end
    for i = 1, math.min(o.most, #(lists[1] or {})) do
      for _, list in ipairs(lists) do x[#x + 1], y[#y + 1] = list[i][1] + (k - 1) * o.apart, list[i][2] end
      x[#x + 1], y[#y + 1] = 0 / 0, 0 / 0 -- a gap
    end
    o.series[k] = { x = x, y = y, label = set.label }
  end
  o.most, o.apart = nil, nil
  return ty.plot.line(o)
end

return M
