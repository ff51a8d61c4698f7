--- Classifiers of scenes: what recipes/zoo/scene-vit.lua and scene-resnet.lua share. A network says of a picture which
-- of the 1,900 sentences of datasets.scenes.statements are true of it and which subgroups of emoji it shows, so that it
-- can judge what was drawn from a caption. The hundred objects come first.
local ty = require "tycho"
local datasets = require "tycho.datasets"
local scenes = require "tycho.zoo.scenes"
local vision = require "tycho.vision"

local nn = ty.nn
local M = {}

local statements = datasets.scenes.statements

-- names: of the subgroups; place: of each by name, from 0; of_object: f32 [objects, subgroups], a 1 where an object is
-- of a subgroup.
local groups
local function read_groups()
  if groups then return groups end
  groups = { names = datasets.emoji.subgroups(), place = {} }
  for i, name in ipairs(groups.names) do groups.place[name] = i - 1 end
  local emoji, rows = datasets.load("emoji", { split = "all", languages = {} }), {}
  for i, object in ipairs(datasets.scenes.objects) do
    rows[i] = groups.place[emoji:get(emoji:find(object.emoji)).subgroup]
  end
  groups.of_object = ty.keep(ty.one_hot(ty.tensor(rows), #groups.names):to "f32")
  return groups
end

--- Names of the labels: the sentences, and then the subgroups of emoji.
---@return string[]
function M.labels()
  local names, all = statements.names(), read_groups().names
  return table.move(all, 1, #all, #names + 1, names)
end

-- Which subgroups are in scenes, f32 [n, subgroups], by which objects are, u8 [n, objects].
local function groups_of_scenes(labels)
  return labels:to("f32"):matmul(read_groups().of_object:to { device = labels.device }):clamp(0, 1)
end

-- ---- what is learnt ----

-- A network in training: its own outputs, and for each of its cells, the patches or the places of its last maps, which
-- object and which colour are on top there. Labels of cells teach much faster than those of whole pictures do. Jiang et
-- al. 2021, "All Tokens Matter: Token Labeling for Training Better Vision Transformers".
local Student = nn.module "Student"
M.Student = Student

-- How many looks a cell may have: an object's own (0), the tints, and none, the last.
local looks = 2
for _ in pairs(datasets.scenes.tints) do looks = looks + 1 end

function Student:init(network, see, width)
  self.network = network
  rawset(self, "see", see)
  self.cells = nn.Linear(width, M.cell_outputs)
end

--- pictures [n, 3, h, w] to logits [n, labels] and [n, cells, objects + 1 + looks].
function Student:forward(pictures)
  local logits, positions = self.see(self.network, pictures)
  return logits, self.cells(positions)
end

--- What a Student of a residual network sees: its logits, and the features at each place of its last maps.
---@param network Module
---@param pictures Tensor
---@return Tensor logits
---@return Tensor features  [n, places, width]
function M.see_maps(network, pictures)
  local maps = network:maps(pictures)
  return network.fc(maps:mean { 2, 3 }), maps:flatten(2):transpose(1, 2)
end

--- How many outputs say what is on top in a cell: objects and nothing, then looks.
M.cell_outputs = #datasets.scenes.objects + 1 + looks

--- What is on top in each cell of a grid over scenes, in short: shares of its pixels, f32 [n, side * side, k + 1], of
-- the k objects that a scene may have and of the background behind them, and what these are, i64 [n, k + 1] each: the
-- number of the object (of nothing: the one after the last) and its look (0: its own, then the tints, then nothing).
-- batch: with the fields owner, boxes and scene.
---@param batch table
---@param side integer  cells of a row
---@return Tensor shares
---@return Tensor numbers
---@return Tensor colours
function M.tops(batch, side)
  local owner, boxes, k = batch.owner, batch.boxes, batch.boxes.shape[2]
  local n, size = owner.shape[1], owner.shape[2]
  local objects, colours, device = #datasets.scenes.objects, {}, owner.device
  for i, scene in ipairs(batch.scene) do
    colours[i] = {}
    for j = 1, k do
      local object = scene.objects[j]
      colours[i][j] = object and (object.colour and datasets.scenes.tints[object.colour] or 0) or looks - 1
    end
    colours[i][k + 1] = looks - 1 -- the background
  end
  local numbers = boxes:select(2, 0):to "i64"
  numbers = numbers:masked_fill(numbers:lt(0), objects)
  numbers = ty.concat({ numbers, ty.full({ n, 1 }, objects, { dtype = "i64", device = device }) }, 1)
  local top = owner:to "i64"
  top = ty.one_hot(top:masked_fill(top:lt(0), k), k + 1):to("f32"):permute { 0, 3, 1, 2 }
  local shares = top:contiguous():avg_pool2d(size // side):flatten(2):transpose(1, 2) -- [n, cells, k + 1]
  return shares, numbers, ty.tensor(colours, { dtype = "i64" }):to { device = device }
end

--- What tops() gives as labels, shares of the pixels of each cell: of the objects and nothing, f32
-- [n, cells, objects + 1], and of an object's own colours, the tints and none, f32 [n, cells, tints + 2].
---@param shares Tensor
---@param numbers Tensor
---@param colours Tensor
---@return Tensor objects
---@return Tensor colours
function M.spread(shares, numbers, colours)
  return shares:matmul(ty.one_hot(numbers, #datasets.scenes.objects + 1):to "f32"),
    shares:matmul(ty.one_hot(colours, looks):to "f32")
end

--- The labels of the cells of scenes, as spread() gives them. batch, side: as of tops().
---@param batch table
---@param side integer
---@return Tensor objects
---@return Tensor colours
function M.cells(batch, side) return M.spread(M.tops(batch, side)) end

local function soft_cross_entropy(logits, shares) return -(shares * logits:log_softmax(-1)):sum(-1):mean() end

--- The error of what was said of cells, [n, cells, cell_outputs], against their labels.
---@param said Tensor
---@param objects Tensor  as of cells()
---@param colours Tensor
---@return Tensor loss
function M.cell_loss(said, objects, colours)
  local width = objects.shape[3]
  return soft_cross_entropy(said:narrow(2, 0, width), objects)
    + soft_cross_entropy(said:narrow(2, width, looks), colours)
end

-- The loss of a batch of scenes with single emoji behind them, of which only the subgroup is known. Sums over labels
-- are divided by 50, so that gradients are of the usual size.
local function loss_of(student, batch, emoji)
  local n, count = batch.image.shape[1], statements.count
  local truth = batch.statements:to "f32"
  local pictures, places = emoji:draw(math.max(1, n // 7))
  local logits, cells = student(ty.concat({ scenes.pictures(batch.image), pictures:to { device = truth.device } }, 0))
  local said = nn.bce_with_logits(logits:narrow(0, 0, n):narrow(1, 0, count), truth) * (count / 50)
  local subgroups = {}
  for i, place in ipairs(places:tolist()) do subgroups[i] = read_groups().place[emoji.subgroups[place + 1]] end
  local single = ty.one_hot(ty.tensor(subgroups), #groups.names):to "f32"
  local shown = ty.concat({ groups_of_scenes(truth:narrow(1, 0, #datasets.scenes.objects)),
    single:to { device = truth.device } }, 0)
  local grouped = nn.bce_with_logits(logits:narrow(1, count, #groups.names), shown) * (#groups.names / 50)
  local objects, colours = M.cells(batch, math.tointeger(cells.shape[2] ^ 0.5))
  local of_cells = M.cell_loss(cells:narrow(0, 0, n), objects, colours)
  return said + grouped + of_cells, { statements = said:detach(), subgroups = grouped:detach(),
    cells = of_cells:detach() }
end

-- ---- how good it is ----

--- How good a judge a network is: objects, the mean average precision of the hundred objects in pictures of a split;
-- colour and place, shares of what captions of real pictures ask for that it sees (datasets.scenes.statements.score).
---@param model Module
---@param split string
---@param count integer  pictures
---@return { mean_average_precision: number, object: number, colour: number, place: number }
function M.measure(model, split, count)
  local batch = scenes.set(split, { "image", "labels", "asked" }):batch(ty.arange(count))
  local logits = vision.scores(model, scenes.pictures(batch.image))
  local shares = statements.score(logits:narrow(1, 0, statements.count), batch.asked)
  shares.mean_average_precision = vision.mean_average_precision(
    logits:narrow(1, 0, #datasets.scenes.objects):sigmoid(), batch.labels)
  return shares
end

--- The share of emoji that were never trained on whose subgroup, of about a hundred, is the likeliest to a network.
---@param model Module
---@return number
function M.subgroups(model)
  local set = datasets.load("emoji", { split = "held_out", languages = {} })
  local batch, right = set:batch(ty.arange(#set)), 0
  local guess = vision.scores(model, scenes.on_colours(batch.image)):narrow(1, statements.count, #read_groups().names)
    :argmax(1):tolist()
  for i, name in ipairs(batch.subgroup) do right = right + (groups.names[guess[i] + 1] == name and 1 or 0) end
  return right / #guess
end

--- Trains a network with an output for each of labels(), keeps it in the folder of its seed, and returns it.
-- see(network, pictures): its logits [n, labels] and the features of its cells [n, cells, width], a square of them.
-- more: an optimizer, as train.fit takes it, and autocast, the dtype of products ("f32").
---@param r Recipe
---@param network Module
---@param see fun(network: Module, pictures: Tensor): Tensor, Tensor
---@param width integer
---@param seed integer
---@param more? { optimizer?: function, autocast?: string }
---@return Module
function M.train(r, network, see, width, seed, more)
  local args, emoji = r.args, scenes.emoji()
  r:say("seed %d: %d parameters", seed, network:count_parameters())
  local student = Student(network, see, width):to(r.device)
  local loader = scenes.loader(r, { "image", "statements", "owner", "boxes", "scene" }, seed)
  local dtype = more and more.autocast or "f32"
  local _, averaged = ty.train.fit(student, loader, scenes.fit_options(r, seed, {
    optimizer = more and more.optimizer,
    loss = function(m, batch) return ty.autocast(dtype, loss_of, m, batch, emoji) end,
    evaluate = function(step, m)
      local found = M.measure(m.network, "validation", math.min(500, args.count))
      r:say("step %d: mean average precision %.3f, colours %.3f, places %.3f", step, found.mean_average_precision,
        found.colour or 0, found.place or 0)
      return found
    end }))
  averaged.network:save(scenes.folder(r, seed))
  return averaged.network:eval()
end

--- Trains a network made by make() for each seed and measures it: the rows of the recipe's table. see and width: as
-- train() has them, and more.
---@param r Recipe
---@param make fun(): Module
---@param see fun(network: Module, pictures: Tensor): Tensor, Tensor
---@param width integer
---@param more? { optimizer?: function, autocast?: string }
---@return RecipeRow[]
function M.rows(r, make, see, width, more)
  local measured = { mean_average_precision = {}, colour = {}, place = {}, combinations = {}, subgroups = {} }
  for i, seed in ipairs(r.seeds) do
    ty.manual_seed(seed)
    local model = scenes.shipped(r, seed) or M.train(r, make(), see, width, seed, more)
    for name, value in pairs(M.measure(model, "validation", r.args.count)) do
      if measured[name] then measured[name][i] = value end
    end
    measured.combinations[i] = M.measure(model, "held_out_combinations", r.args.count).mean_average_precision
    measured.subgroups[i] = M.subgroups(model)
  end
  return {
    { claim = "mean average precision of 90 objects in scenes of the validation part",
      values = measured.mean_average_precision, bar = 0.95 },
    { claim = "the same in scenes with combinations never seen", values = measured.combinations, judged = false },
    { claim = "colours that captions name, share seen", values = measured.colour, judged = false },
    { claim = "places that captions name, share seen", values = measured.place, judged = false },
    { claim = "subgroup of emoji never seen, share right", values = measured.subgroups, judged = false },
  }
end

return M
