--- Tracking by one vision transformer over the tokens of a template and of a search region. Lin et al. 2024, "Tracking
-- Meets LoRA: Faster Training, Larger Model, Stronger Performance".
--
--     local tracker = vision.track.Tracker(vit, { template = 32 })
--     peft.lora(tracker, { rank = 16, targets = "encoder", save = { "score", "distances" } })
--     tracker.types:requires_grad_(true)
--     local loss = tracker:loss(vision.track.pairs(videos, boxes))
--     local boxes = tracker:follow(video, first_box)
--
-- Both pictures take their positions from the one table that the transformer was trained with, the template those of
-- the upper left of it; what they are is told by learned vectors: search, template's object, template's surroundings.
-- So nothing but these, low-rank updates and the heads is new. The heads are two MLPs of three layers over each token
-- of the search region: how well the token knows the object, and how far from its centre the box's sides are.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local boxes_of = require "tycho.vision.boxes"

local nn = ty.nn
local expect, fail = arguments.expect, arguments.fail
local parameter = require("tycho.nn.options").parameter
local M = {}

local Head = nn.module "TrackHead"

function Head:init(width, outputs)
  self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
    nn.Linear(width, outputs))
end

function Head:forward(x) return self.layers(x) end

-- A head of convolutions, to compare with: it looks at neighbours as well.
local Convolutions = nn.module "TrackConvolutions"

function Convolutions:init(width, outputs)
  self.layers = nn.Sequential(nn.Conv2d(width, width, 3, { padding = 1 }), nn.ReLU(),
    nn.Conv2d(width, width, 3, { padding = 1 }), nn.ReLU(), nn.Conv2d(width, outputs, 1))
end

function Convolutions:forward(x)
  local n, cells, width = x.shape[1], x.shape[2], x.shape[3]
  local side = math.tointeger(cells ^ 0.5)
  return self.layers(x:transpose(1, 2):reshape(n, width, side, side)):flatten(2):transpose(1, 2)
end

--- A tracker over a vision transformer.
---@class Tracker: Module
---@field side integer      pixels of a search region's side
---@field template integer  of a template's
local Tracker = nn.module "Tracker"

local defaults = { template = arguments.none, positions = "shared", head = "mlp", template_factor = 2,
  search_factor = 4 }
local kinds = { template = "an integer >= 1", positions = '"shared" or "own"', head = '"mlp" or "conv"',
  template_factor = "a finite number > 0", search_factor = "a finite number > 0" }

--- vit: a models.ViT, whose image_size is the side of search regions; it becomes part of the tracker. options:
--   template         pixels of a template's side (half of the search region's)
--   positions        "shared"; "own": a table of its own for the template, to compare with
--   head             "mlp"; "conv", to compare with
--   template_factor  how wide a template is, in square roots of the box's area (2), search_factor: a search region (4)
---@param vit ViT
---@param options? table
function Tracker:init(vit, options)
  local who = "Tracker"
  expect(who, "vit", vit, "a module")
  local o = arguments.read(who, options, defaults, kinds)
  local config, embeddings = vit.config, vit.embeddings
  if not config or not embeddings or embeddings.rows ~= embeddings.columns then
    fail("%s: vit: expected a models.ViT of square pictures, got %s", who, arguments.describe(vit))
  end
  local patch, rows = config.patch_size, embeddings.rows
  local template = o.template or rows // 2 * patch
  if template % patch ~= 0 or template > rows * patch then
    fail("%s: template: expected a multiple of the patch, %d, of at most %d, got %d", who, patch, rows * patch,
      template)
  end
  self.vit, self.rows, self.patch, self.template, self.side = vit, rows, patch, template, rows * patch
  self.template_factor, self.search_factor = o.template_factor, o.search_factor
  local width = config.hidden_size
  local function normal(t) nn.init.trunc_normal(t, 0, 0.02) end
  self.types = parameter({ 3, width }, normal) -- search, the template's object, its surroundings
  if o.positions == "own" then
    self.template_positions = parameter({ 1, (template // patch) * (template // patch), width }, normal)
  end
  local Kind = o.head == "mlp" and Head or Convolutions
  self.score, self.distances = Kind(width, 1), Kind(width, 4)
  -- Rarely a token is the object, and boxes begin as a third of the search region.
  local last = self.score.layers[#self.score.layers]
  if last.bias.device ~= "meta" then
    nn.init.constant(last.bias, -2)
    nn.init.constant(self.distances.layers[#self.distances.layers].bias, -1.6)
  end
end

-- The positions of a grid of `rows` from the upper left of the transformer's table, [1, rows * rows, width].
local function positions_of(self, rows)
  local table_of = self.vit.embeddings.position_embeddings
  local width = table_of.shape[3]
  local grid = table_of:narrow(1, 1, self.rows * self.rows):reshape(self.rows, self.rows, width)
  return grid:narrow(0, 0, rows):narrow(1, 0, rows):reshape(1, rows * rows, width)
end

local function tokens_of(self, pictures)
  return self.vit.embeddings.patch_embeddings(pictures):flatten(2):transpose(1, 2)
end

-- Which tokens of templates are the object: those whose centre is within the box (of the template, 0 to 1), f32 [n, t,
-- 1].
local function inside(centres, boxes)
  local x, y = centres:select(-1, 0), centres:select(-1, 1)
  local b = boxes:unsqueeze(1)
  return x:ge(b:select(-1, 0)):logical_and(x:le(b:select(-1, 2))):logical_and(y:ge(b:select(-1, 1)))
    :logical_and(y:le(b:select(-1, 3)))
end

--- The centres of the cells of a grid of `rows` by `rows`, in units of the picture's side, f32 [1, rows * rows, 2].
---@param rows integer
---@param device? string
---@return Tensor
function M.centres(rows, device)
  expect("vision.track.centres", "rows", rows, "an integer >= 1")
  local at = (ty.arange(rows, { dtype = "f32", device = expect("vision.track.centres", "device", device,
    "a string or nil") or "cpu" }) + 0.5) / rows
  return ty.stack({ at:unsqueeze(0):expand(rows, rows), at:unsqueeze(1):expand(rows, rows) }, -1)
    :reshape(1, rows * rows, 2)
end

local function check_inputs(self, who, template, search, box)
  expect(who, "template", template, "a tensor")
  expect(who, "search", search, "a tensor")
  expect(who, "box", box, "a tensor")
  local n, c = search.shape[1], self.vit.config.num_channels
  local function is(t, side)
    return t.ndim == 4 and t.shape[1] == n and t.shape[2] == c and t.shape[3] == side and t.shape[4] == side
  end
  if not is(template, self.template) or not is(search, self.side) or box.ndim ~= 2 or box.shape[1] ~= n
    or box.shape[2] ~= 4 then
    fail("%s: expected template [n, %d, %d, %d], search [n, %d, %d, %d] and box [n, 4], got %s, %s and %s", who, c,
      self.template, self.template, c, self.side, self.side, arguments.describe(template), arguments.describe(search),
      arguments.describe(box))
  end
end

--- For each token of the search regions a logit [n, cells] and a box [n, cells, 4] in units of the region. template [n,
-- c, t, t], search [n, c, s, s]; box [n, 4]: the object in the template, in its units.
---@param template Tensor
---@param search Tensor
---@param box Tensor
---@return Tensor logits
---@return Tensor boxes
function Tracker:forward(template, search, box)
  check_inputs(self, "Tracker", template, search, box)
  local rows = self.template // self.patch
  local own = inside(M.centres(rows, box.device), box):unsqueeze(-1):to(self.types.dtype)
  local kinds_of = own * self.types:narrow(0, 1, 1) + (1 - own) * self.types:narrow(0, 2, 1)
  local z = tokens_of(self, template) + (self.template_positions or positions_of(self, rows)) + kinds_of
  local x = tokens_of(self, search) + positions_of(self, self.rows) + self.types:narrow(0, 0, 1)
  local both = ty.concat({ z, x }, 1)
  -- In scopes: what a layer made on the way goes at once, but for what the graph keeps.
  for _, layer in ipairs(self.vit.encoder.layer) do both = ty.scope(layer, both) end
  x = self.vit.layernorm(both):narrow(1, rows * rows, self.rows * self.rows)
  return self.score(x):squeeze(-1), M.decode(self.distances(x):sigmoid(), self.rows)
end

--- Boxes [n, cells, 4] from distances [n, cells, 4] of their left, upper, right and lower sides from the centres of the
-- cells of a grid of `rows` by `rows`, all in units of the region.
---@param distances Tensor
---@param rows integer
---@return Tensor
function M.decode(distances, rows)
  local who = "vision.track.decode"
  expect(who, "distances", distances, "a tensor")
  local centres = M.centres(expect(who, "rows", rows, "an integer >= 1"), distances.device)
  if distances.ndim ~= 3 or distances.shape[2] ~= rows * rows or distances.shape[3] ~= 4 then
    fail("%s: distances: expected [n, %d, 4], got %s", who, rows * rows, arguments.describe(distances))
  end
  return ty.concat({ centres - distances:narrow(-1, 0, 2), centres + distances:narrow(-1, 2, 2) }, -1)
end

--- The inverse: distances [n, cells, 4] of boxes [n, 4] from the centres of the cells, negative where one is outside.
---@param boxes Tensor
---@param rows integer
---@return Tensor
function M.encode(boxes, rows)
  local who = "vision.track.encode"
  expect(who, "boxes", boxes, "a tensor")
  local centres = M.centres(expect(who, "rows", rows, "an integer >= 1"), boxes.device)
  if boxes.ndim ~= 2 or boxes.shape[2] ~= 4 then
    fail("%s: boxes: expected [n, 4], got %s", who, arguments.describe(boxes))
  end
  boxes = boxes:unsqueeze(1)
  return ty.concat({ centres - boxes:narrow(-1, 0, 2), boxes:narrow(-1, 2, 2) - centres }, -1)
end

--- The loss of what forward() gives: of tokens within the box binary cross entropy with the overlap of their own box as
-- target, of all others with 0, and of those within 1 - GIoU; both over the number of tokens within. truth [n, 4]: the
-- object in the search regions, in their units.
---@param logits Tensor
---@param boxes Tensor
---@param truth Tensor
---@return Tensor loss
function M.loss(logits, boxes, truth)
  local who = "vision.track.loss"
  expect(who, "logits", logits, "a tensor")
  expect(who, "boxes", boxes, "a tensor")
  expect(who, "truth", truth, "a tensor")
  local cells = logits.ndim == 2 and logits.shape[2] or 0
  local rows = math.tointeger(cells ^ 0.5)
  if not rows or rows == 0 or boxes.ndim ~= 3 or boxes.shape[2] ~= cells or truth.ndim ~= 2
    or truth.shape[1] ~= logits.shape[1] then
    fail("%s: expected logits [n, cells], boxes [n, cells, 4] and truth [n, 4], got %s, %s and %s", who,
      arguments.describe(logits), arguments.describe(boxes), arguments.describe(truth))
  end
  local centres, whole = M.centres(rows, truth.device), truth:unsqueeze(1)
  local within = inside(centres, truth)
  -- A box between the centres has the nearest cell.
  local middle = (whole:narrow(-1, 0, 2) + whole:narrow(-1, 2, 2)) / 2
  local far = (centres - middle):square():sum(-1)
  within = within:logical_or(far:le(far:amin({ 1 }, true))):to(logits.dtype)
  local count = within:sum():clamp(1)
  local target = boxes_of.iou(boxes:detach(), whole):clamp(0, 1) * within
  local scored = nn.bce_with_logits(logits, target, { reduction = "sum" })
  local placed = ((1 - boxes_of.giou(boxes, whole)) * within):sum()
  return (scored + placed) / count
end

--- The loss of a table of template, search, box and truth, as vision.track.pairs makes it.
---@param pairs_of {template: Tensor, search: Tensor, box: Tensor, truth: Tensor}
---@return Tensor loss
function Tracker:loss(pairs_of)
  expect("Tracker:loss", "pairs", pairs_of, "a table")
  local logits, boxes = self:forward(pairs_of.template, pairs_of.search, pairs_of.box)
  return M.loss(logits, boxes, pairs_of.truth)
end

--- Templates and search regions for a tracker: from pictures `first` and `second` [n, c, h, w] (floats) with the object
-- at `a` and `b` [n, 4] (pixels). The search region is around `guess` [n, 4] (b by default: put it a little aside).
---@param tracker Tracker
---@param first Tensor
---@param a Tensor
---@param second Tensor
---@param b Tensor
---@param guess? Tensor
---@return {template: Tensor, search: Tensor, box: Tensor, truth: Tensor}
function M.pairs(tracker, first, a, second, b, guess)
  local who = "vision.track.pairs"
  expect(who, "tracker", tracker, "a module")
  expect(who, "first", first, "a tensor")
  expect(who, "a", a, "a tensor")
  expect(who, "second", second, "a tensor")
  expect(who, "b", b, "a tensor")
  expect(who, "guess", guess, "a tensor or nil")
  if not tracker.template_factor then
    fail("%s: tracker: expected a vision.track.Tracker, got %s", who, arguments.describe(tracker))
  end
  local seen = boxes_of.around(a, tracker.template_factor)
  local window = boxes_of.around(guess or b, tracker.search_factor)
  return { template = boxes_of.crop(first, seen, tracker.template), box = boxes_of.into(a, seen),
    search = boxes_of.crop(second, window, tracker.side), truth = boxes_of.into(b, window) }
end

-- A hill over the cells, highest in the middle, f32 [1, cells]: what has moved far is less likely.
local function hann(rows, device)
  local at = (ty.arange(rows, { dtype = "f32", device = device }) + 1) * (2 * math.pi / (rows + 1))
  local line = (1 - at:cos()) / 2
  return (line:unsqueeze(1) * line:unsqueeze(0)):reshape(1, rows * rows)
end

--- Follows objects through videos, frame by frame, in evaluation mode: videos f32 [n, frames, c, h, w], first [n, 4]
-- the boxes of their first frames. Each frame is searched around the box of the one before. options: window (0.3: how
-- much of the score is that of having stayed near). Returns boxes [n, frames, 4].
---@param videos Tensor
---@param first Tensor
---@param options? {window?: number}
---@return Tensor boxes
function Tracker:follow(videos, first, options)
  local who = "Tracker:follow"
  expect(who, "videos", videos, "a tensor")
  expect(who, "first", first, "a tensor")
  local o = arguments.read(who, options, { window = 0.3 }, { window = "a number in [0, 1]" })
  if videos.ndim ~= 5 or first.ndim ~= 2 or first.shape[1] ~= videos.shape[1] or first.shape[2] ~= 4 then
    fail("%s: expected videos [n, frames, c, h, w] and first [n, 4], got %s and %s", who, arguments.describe(videos),
      arguments.describe(first))
  end
  local n, frames, h, w = videos.shape[1], videos.shape[2], videos.shape[4], videos.shape[5]
  local training = self.training
  self:eval()
  local ok, list = pcall(ty.no_grad, function()
    local seen = boxes_of.around(first, self.template_factor)
    local template = boxes_of.crop(videos:select(1, 0), seen, self.template)
    local box, at, all = boxes_of.into(first, seen), first, { first }
    local hill = hann(self.rows, first.device)
    for f = 1, frames - 1 do
      at = ty.scope(function()
        local window = boxes_of.around(at, self.search_factor)
        local logits, boxes = self:forward(template, boxes_of.crop(videos:select(1, f), window, self.side), box)
        local score = logits:sigmoid() * (1 - o.window) + hill * o.window
        local best = score:argmax(1):reshape(n, 1, 1):expand(n, 1, 4)
        local found = boxes_of.out_of(boxes:gather(1, best):squeeze(1), window)
        local x, y = found:narrow(-1, 0, 1), found:narrow(-1, 1, 1)
        local r, b = found:narrow(-1, 2, 1), found:narrow(-1, 3, 1)
        -- Within the picture, and at least two pixels wide.
        x, y = x:clamp(0, w - 2), y:clamp(0, h - 2)
        return ty.concat({ x, y, ty.maximum(r:clamp(0, w), x + 2), ty.maximum(b:clamp(0, h), y + 2) }, -1)
      end)
      all[#all + 1] = at
    end
    return ty.stack(all, 1)
  end)
  self:train(training)
  if not ok then error(list, 0) end
  return list
end

--- Success of tracking: of overlaps (any shape) the share above each of `count` thresholds from 0 to 1, and the area
-- under that curve, which tends to the mean overlap. Wu et al. 2013, "Online Object Tracking: A Benchmark".
---@param overlaps Tensor
---@param count? integer  21
---@return number area
---@return number[] curve
function M.success(overlaps, count)
  local who = "vision.track.success"
  expect(who, "overlaps", overlaps, "a tensor")
  count = expect(who, "count", count, "an integer >= 2 or nil") or 21
  if overlaps:numel() == 0 then fail("%s: overlaps: expected at least one, got none", who) end
  local at = ty.linspace(0, 1, count, { dtype = "f64" })
  local shares = overlaps:flatten():to("f64"):unsqueeze(0):gt(at:unsqueeze(1)):to("f64"):mean(1)
  local curve, sum = shares:tolist(), 0
  for i = 2, count do sum = sum + (curve[i - 1] + curve[i]) / 2 / (count - 1) end
  return sum, curve
end

--- Videos of one object each, with its boxes: what draw() and evaluate() take.
---@class TrackedVideos
---@field video Tensor  [clips, frames, c, h, w]
---@field boxes Tensor  f32 [clips, frames, 4], pixels

local function check_videos(who, set)
  expect(who, "set", set, "a table")
  expect(who, "set.video", set.video, "a tensor")
  expect(who, "set.boxes", set.boxes, "a tensor")
  local v, b = set.video.shape, set.boxes.shape
  if #v ~= 5 or #b ~= 3 or b[1] ~= v[1] or b[2] ~= v[2] or b[3] ~= 4 or v[1] == 0 then
    fail("%s: set: expected video [clips, frames, c, h, w] and boxes [clips, frames, 4], got %s and %s", who,
      arguments.describe(set.video), arguments.describe(set.boxes))
  end
end

--- Random pairs of frames of the same videos to learn from, for pairs(): n times two frames with the boxes there, and a
-- guess for the second. options: aside (0.8: by how much of the box's size the guess is off, at most), picture (what is
-- made of a frame, [c, h, w]; by default it is of the video's type).
---@param set TrackedVideos
---@param n integer
---@param options? { aside?: number, picture?: fun(frame: Tensor): Tensor }
---@return Tensor first
---@return Tensor a
---@return Tensor second
---@return Tensor b
---@return Tensor guess
function M.draw(set, n, options)
  local who = "vision.track.draw"
  check_videos(who, set)
  expect(who, "n", n, "an integer >= 1")
  local o = arguments.read(who, options, { aside = 0.8, picture = function(frame) return frame end },
    { aside = "a finite number >= 0", picture = "a function" })
  local count, frames = set.video.shape[1], set.video.shape[2]
  local first, second, a, b = {}, {}, {}, {}
  for i = 1, n do
    local clip, from, to = table.unpack(ty.randint(0, count, { 3 }):tolist())
    local video, boxes = set.video:select(0, clip), set.boxes:select(0, clip)
    from, to = from % frames, to % frames
    first[i], second[i] = o.picture(video:select(0, from)), o.picture(video:select(0, to))
    a[i], b[i] = boxes:select(0, from), boxes:select(0, to)
  end
  a, b = ty.stack(a, 0), ty.stack(b, 0)
  local size = boxes_of.around(b, 1)
  local shift = (ty.rand(n, 2) * 2 - 1) * (size:narrow(1, 2, 1) - size:narrow(1, 0, 1)) * o.aside
  return ty.stack(first, 0), a, ty.stack(second, 0), b, b + ty.concat({ shift, shift }, 1)
end

--- The success of following through all videos, without their first frames, whose boxes are given. follow(videos,
-- boxes) gives boxes [n, frames, 4], as Tracker:follow does, for up to `batch` (25) videos at a time.
---@param follow fun(videos: Tensor, first: Tensor): Tensor
---@param set TrackedVideos
---@param batch? integer
---@return number area
---@return number[] curve
function M.evaluate(follow, set, batch)
  local who = "vision.track.evaluate"
  expect(who, "follow", follow, "a function")
  check_videos(who, set)
  batch = expect(who, "batch", batch, "an integer >= 1 or nil") or 25
  local count, frames, list = set.video.shape[1], set.video.shape[2], {}
  if frames < 2 then fail("%s: set: expected at least 2 frames, got %d", who, frames) end
  for at = 0, count - 1, batch do
    local n = math.min(batch, count - at)
    list[#list + 1] = ty.scope(function()
      local truth = set.boxes:narrow(0, at, n)
      local found = follow(set.video:narrow(0, at, n), truth:select(1, 0))
      expect(who, "what follow gives", found, "a tensor")
      return boxes_of.iou(found:narrow(1, 1, frames - 1), truth:narrow(1, 1, frames - 1))
    end)
  end
  return M.success(ty.concat(list, 0))
end

--- Frames one after another with the true boxes in green and those that were found in white, over them: [n * frames, 3,
-- h, w] for ty.plot.grid. videos: floats from -1 to 1.
---@param videos Tensor  [n, frames, 3, h, w]
---@param truth Tensor   [n, frames, 4]
---@param found Tensor   [n, frames, 4]
---@return Tensor
function M.film(videos, truth, found)
  local who = "vision.track.film"
  check_videos(who, { video = videos, boxes = truth })
  check_videos(who, { video = videos, boxes = found })
  local list = {}
  for clip = 0, videos.shape[1] - 1 do
    for f = 0, videos.shape[2] - 1 do
      local picture = boxes_of.drawn(videos:select(0, clip):select(0, f), truth:select(0, clip):select(0, f),
        { -1, 1, -1 })
      list[#list + 1] = boxes_of.drawn(picture, found:select(0, clip):select(0, f), { 1, 1, 1 })
    end
  end
  return ty.stack(list, 0)
end

M.Tracker = Tracker
--- A tracker without a network, to compare with: among windows around the last one, moved by up to `reach` pixels in
-- steps of two, the one whose colours at 8 x 8 places are most like those of the first frame's window (normalised
-- cross-correlation). video f32 [frames, 3, h, w], first [4]. Returns boxes [frames, 4].
---@param video Tensor
---@param first Tensor
---@param reach? integer  8
---@return Tensor boxes
function M.by_colours(video, first, reach)
  local who = "vision.track.by_colours"
  expect(who, "video", video, "a tensor")
  expect(who, "first", first, "a tensor")
  reach = expect(who, "reach", reach, "an integer >= 1 or nil") or 8
  if video.ndim ~= 4 or video.shape[2] ~= 3 or first.ndim ~= 1 or first.shape[1] ~= 4 then
    fail("%s: expected video [frames, 3, h, w] and first [4], got %s and %s", who, arguments.describe(video),
      arguments.describe(first))
  end
  return ty.no_grad(ty.scope, function()
    local h, w = video.shape[3], video.shape[4]
    local function view(frame, windows)
      local n = windows.shape[1]
      local pictures = video:select(0, frame):unsqueeze(0):expand(n, 3, h, w):contiguous()
      local colours = boxes_of.crop(pictures, windows, 8):flatten(1)
      return colours - colours:mean(1, true)
    end
    local steps = ty.arange(-reach, reach + 1, 2)
    local moves = ty.cartesian_prod(steps, steps):to { dtype = "f32", device = video.device }
    local at = first:unsqueeze(0)
    local template, list = view(0, at), { at }
    for frame = 1, video.shape[1] - 1 do
      local windows = at + ty.concat({ moves, moves }, 1)
      local seen = view(frame, windows)
      local likeness = (seen * template):sum(1) / (seen:norm(2, 1) + 1e-6)
      at = windows:narrow(0, likeness:argmax(0):item(), 1)
      list[frame + 1] = at
    end
    return ty.concat(list, 0)
  end)
end

return M
