--- Structure guidance: a large sample is cut into pieces that each show the whole of it, every s-th place, and what the
-- network says of the first piece leads the others, so that all agree on one picture instead of repeating it. Li et al.
-- 2024, "ASGDiffusion: Parallel High-Resolution Generation with Asynchronous Structure Guidance":
--
--     e(x_i) <- e(x_i) + w M (e(x_0) - e(x_i))
--
-- M a mask of what the words' attention is at, w falling. Asynchronous: e(x_0) is that of the step before, so that no
-- device waits for another. How w falls the abstract does not say; here as half a cosine from its first value to 0.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"
local cross = require "tycho.diffusion.attention.cross"
local noises = require "tycho.diffusion.seeds"
local predictions = require "tycho.diffusion.prediction"

local expect, fail = arguments.expect, arguments.fail
local M = {}

-- ---- pieces ----

--- A sample in s x s pieces, each every s-th place of each side: [n, c, s h, s w] to [s s n, c, h, w], piece after
-- piece. fold (1): where channels are fold x fold pixels of a place, pixels are what is shared out. The noise of a
-- piece is as that of the whole.
---@param x Tensor
---@param scale integer
---@param fold? integer
---@return Tensor
function M.pieces(x, scale, fold)
  local who = "structure.pieces"
  expect(who, "x", x, "a tensor")
  expect(who, "scale", scale, "an integer >= 1")
  expect(who, "fold", fold, "an integer >= 1 or nil")
  fold = fold or 1
  if x.ndim ~= 4 or x.shape[3] % scale ~= 0 or x.shape[4] % scale ~= 0 or x.shape[2] % (fold * fold) ~= 0 then
    fail("%s: x: expected [n, channels, height, width] with sides that are multiples of %d and channels of %d, got %s",
      who, scale, fold * fold, arguments.describe(x))
  end
  if fold > 1 then x = ty.pixel_shuffle(x, fold) end
  x = x:rearrange("n c (h a) (w b) -> (a b n) c h w", { a = scale, b = scale })
  return (fold > 1 and ty.pixel_unshuffle(x, fold) or x):contiguous()
end

--- The sample that pieces() cut.
---@param pieces Tensor
---@param scale integer
---@param fold? integer
---@return Tensor
function M.whole(pieces, scale, fold)
  local who = "structure.whole"
  expect(who, "pieces", pieces, "a tensor")
  expect(who, "scale", scale, "an integer >= 1")
  expect(who, "fold", fold, "an integer >= 1 or nil")
  fold = fold or 1
  if pieces.ndim ~= 4 or pieces.shape[1] % (scale * scale) ~= 0 or pieces.shape[2] % (fold * fold) ~= 0 then
    fail("%s: pieces: expected [%d n, channels, height, width] with channels that are a multiple of %d, got %s", who,
      scale * scale, fold * fold, arguments.describe(pieces))
  end
  local x = fold > 1 and ty.pixel_shuffle(pieces, fold) or pieces
  x = x:rearrange("(a b n) c h w -> n c (h a) (w b)", { a = scale, b = scale })
  return (fold > 1 and ty.pixel_unshuffle(x, fold) or x):contiguous()
end

--- The noise of a solver's steps for some pieces: drawn for the whole by its seeds, then cut as the samples are.
-- shape: of the whole. What Sampler:sample takes as `fresh`.
---@param seeds integer[]
---@param shape integer[]
---@param scale integer
---@param fold integer
---@param pieces integer[]  their numbers, from 0
---@return fun(draw: integer, x: Tensor): Tensor
function M.fresh(seeds, shape, scale, fold, pieces)
  local who = "structure.fresh"
  expect(who, "seeds", seeds, "a list of integers")
  expect(who, "shape", shape, "a list of integers >= 1")
  expect(who, "scale", scale, "an integer >= 1")
  expect(who, "fold", fold, "an integer >= 1")
  expect(who, "pieces", pieces, "a list of integers >= 0")
  local draw, n = noises.noise(seeds), shape[1]
  return function(number, x)
    local all = M.pieces(draw(number, ty.empty(shape, { dtype = x.dtype, device = x.device })), scale, fold)
    local rows = {}
    for i, piece in ipairs(pieces) do rows[i] = all:narrow(0, piece * n, n) end
    return #rows == 1 and rows[1] or ty.concat(rows, 0)
  end
end

-- ---- the part ----

--- A part of a sampler over pieces. Its guides are what other ranks are told.
---@class StructurePart
---@field pieces integer[]
local Part = {}
Part.__index = Part

--- A part of a sampler whose samples are pieces, piece after piece, n samples of each. options:
--   pieces  ({ 0 }): the numbers of those that this sampler has, from 0
--   steps   (20): over which the weight falls
--   weight  (0.5): w at the first step
--   of      ("sample"): what leads, the clean sample as it is predicted, or "epsilon", the noise, as the paper says
--   lag     (0): the guide is that of so many steps before; the first step's own where there is none yet
--   words   tokens [n, tokens] (true: what the mask is made of); nil: M is 1 everywhere
--   network that the maps of attention are taken from, where there are words: its layers are watched by cross.watch
--           with the state `seen`
-- The guide of a step is piece 0's; in a sampler without piece 0 it is put there by give(). For solvers that ask the
-- network once a step.
---@param options table
---@return StructurePart part
function M.part(options)
  local who = "structure.part"
  local o = arguments.read(who, options, { pieces = { 0 }, steps = 20, weight = 0.5, of = "sample", lag = 0,
    words = arguments.none, seen = arguments.none }, { pieces = "a list of integers >= 0", steps = "an integer >= 1",
    weight = "a number in [0, 1]", lag = "an integer >= 0", words = "a tensor", seen = "a table" })
  if o.of ~= "sample" and o.of ~= "epsilon" then
    fail("%s: of: expected \"sample\" or \"epsilon\", got %s", who, arguments.describe(o.of))
  end
  if #o.pieces == 0 then fail("%s: pieces: expected at least one, got none", who) end
  if o.words and not o.seen then fail("%s: seen: expected what cross.watch fills, beside words, got nil", who) end
  return setmetatable(o, Part)
end

function Part.start() return { guides = {} } end

--- w at a step, from 1: half a cosine from `weight` to 0.
---@param step integer
---@return number
function Part:weight_at(step)
  expect("StructurePart:weight_at", "step", step, "an integer >= 1")
  return self.weight * 0.5 * (1 + math.cos(math.pi * math.min(1, (step - 1) / self.steps)))
end

--- The step whose guide is used at a step.
---@param step integer
---@return integer
function Part:guided_by(step)
  expect("StructurePart:guided_by", "step", step, "an integer >= 1")
  return math.max(1, step - self.lag)
end

--- Puts the guide of a step there, as guide() gave it in another sampler.
---@param run Run
---@param step integer
---@param guide { sample: Tensor, mask?: Tensor }
function Part:give(run, step, guide)
  expect("StructurePart:give", "run", run, "a table")
  expect("StructurePart:give", "guide", guide, "a table")
  run.state[self].guides[step] = guide
end

--- The guide of a step: what leads, [n, c, h, w], and the mask [n, 1, h, w], if there is one. nil: there is none.
---@param run Run
---@param step integer
---@return { sample: Tensor, mask?: Tensor }?
function Part:guide(run, step)
  expect("StructurePart:guide", "run", run, "a table")
  return run.state[self].guides[step]
end

-- Whether piece 0 is the first of this sampler's.
local function leads(self) return self.pieces[1] == 0 end

-- The words of a call's rows: those of the branch "condition", nothing in others.
local function looked_for(self, branches)
  local list = {}
  for i, name in ipairs(branches) do
    list[i] = name == "condition" and self.words or ty.zeros_like(self.words)
  end
  return #list == 1 and list[1] or ty.concat(list, 0)
end

-- Piece by piece, so that what is said of a piece does not depend on who else is in its batch: on one device or on
-- many it is the same to the last bit.
function Part:call(run, next, request)
  local state, count = run.state[self], #self.pieces
  local rows = request.x.shape[1] // #request.branches
  if rows % count ~= 0 then
    fail("structure.part: expected as many samples of each of %d pieces, got %d in all", count, rows)
  end
  local n, outputs = rows // count, {}
  local key = table.concat(request.branches, "\0")
  state.places = state.places or {}
  local places = state.places[key] or {}
  state.places[key] = places
  for p = 1, count do
    if not places[p] then
      local list = {}
      for b = 0, #request.branches - 1 do
        for i = 0, n - 1 do list[#list + 1] = b * rows + (p - 1) * n + i end
      end
      local index = ty.tensor(list, { dtype = "i64", device = request.x.device })
      places[p] = ty.keep { index = index, condition = conditions.select(request.condition, index) }
    end
    local watching = self.words and p == 1 and leads(self) and key:find("condition", 1, true)
    if watching then self.seen.positions, self.seen.seen = looked_for(self, request.branches), {} end
    local one = {}
    for name, value in pairs(request) do one[name] = value end
    one.x, one.condition = request.x:index_select(0, places[p].index), places[p].condition
    outputs[p] = next(one)
    if watching then
      local map = cross.map(self.seen.seen, request.x.shape[3], request.x.shape[4])
      for b, name in ipairs(request.branches) do
        if name == "condition" then state.mask = ty.keep(map:narrow(0, (b - 1) * n, n):contiguous()) end
      end
      for _, shares in ipairs(self.seen.seen) do shares:free() end
      self.seen.positions, self.seen.seen = nil, {}
    end
  end
  local list = {}
  for b = 0, #request.branches - 1 do
    for p = 1, count do list[#list + 1] = outputs[p]:narrow(0, b * n, n) end
  end
  return #list == 1 and list[1] or ty.concat(list, 0)
end

function Part:predict(run, next, x, point)
  local state = run.state[self]
  if state.asked == run.step then
    fail "structure.part: solver: expected one that asks the network once a step, such as ddim, euler or dpmpp_2m"
  end
  state.asked = run.step
  local prediction = next(x, point)
  if leads(self) then
    local n = x.shape[1] // #self.pieces
    state.guides[run.step] = { sample = ty.keep(prediction:as(self.of):narrow(0, 0, n):clone()), mask = state.mask }
    state.guides[run.step - self.lag - 1] = nil
  end
  return prediction
end

function Part:advance(run, next, prediction, to)
  local w, count = self:weight_at(run.step), #self.pieces
  local first = leads(self) and 1 or 0 -- the piece that leads is not led
  if w == 0 then return next(prediction, to) end
  local step, x, own = self:guided_by(run.step), prediction.x, prediction:as(self.of)
  local guide = run.state[self].guides[step]
  if not guide then fail("structure.part: expected a guide of step %d, which give() puts there, got none", step) end
  local n, led = x.shape[1] // count, own
  if count > first then
    led = own:narrow(0, first * n, (count - first) * n):reshape(count - first, n, x.shape[2], x.shape[3], x.shape[4])
    local share = guide.mask and guide.mask:unsqueeze(0) * w or w
    led = (led + (guide.sample:unsqueeze(0) - led) * share):flatten(0, 1)
    if first == 1 then led = ty.concat({ own:narrow(0, 0, n), led }, 0) end
  end
  if self.of == "sample" then return next(prediction:with_sample(led), to) end
  return next(predictions.new("epsilon", x, led, prediction.point, prediction.data), to)
end

return M
