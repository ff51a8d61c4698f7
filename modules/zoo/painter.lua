--- Networks that draw scenes from captions: what recipes/zoo/scene-unet.lua and scene-dit.lua share. The pictures of
-- training scenes are latents of the zoo's autoencoder, made once; captions are read by the text encoder of its CLIP.
-- Drawn pictures are measured by judges of the zoo, which say what of a caption they see.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local crops = require "tycho.zoo.crops"
local diffusion = require "tycho.diffusion"
local drawings = require "tycho.zoo.drawings"
local hub = require "tycho.hub"
local judge = require "tycho.zoo.judge"
local models = require "tycho.models"
local scenes = require "tycho.zoo.scenes"
local shelf = require "tycho.zoo.shelf"

local nn = ty.nn
local M = {}

local shown = scenes.drawn

--- The arguments of such a recipe.
---@param own table<string, number>  steps, batch, lr, every, scenes, guidance
---@param more? RecipeArgument[]
---@return RecipeArgument[]
function M.arguments(own, more)
  local list = {
    { "scenes", own.scenes or 60000, "that are trained on", quick = 24 },
    { "most", shown.objects[2], "objects in a scene" },
    { "backgrounds", shown.backgrounds, "of the scenes; all: of every kind" },
    { "kinds", shown.objects_of, "of objects; all: each of the ninety" },
    { "rotation", shown.rotation, "of objects, in degrees at most" },
    { "length", 24, "tokens of a caption" },
    { "guidance", own.guidance or 4.0, "scale of classifier-free guidance in drawing" },
    { "drawing_steps", 20, "steps of drawing", quick = 2 },
    { "judge_steps", 800, "steps in which scene-resnet is tuned to judge what is drawn", quick = 2 },
  }
  table.move(more or {}, 1, #(more or {}), #list + 1, list)
  return scenes.arguments(own, list)
end

-- The text encoder of a CLIP as a network of its own.
local function text_encoder_of(clip)
  local config = clip:published_config().text_config
  config.projection_dim = clip.config.projection_dim
  local encoder, state = models.CLIPTextModelWithProjection(config), {}
  local all = clip:state_dict()
  for name in pairs(encoder:state_dict()) do state[name] = all[name] end
  encoder:load_state_dict(state)
  return encoder:eval()
end

--- The pipeline that a network becomes part of: the zoo's autoencoder and text encoder, a scheduler's config.
---@param r Recipe
---@param name string      "unet" or "transformer"
---@param network Module
---@param scheduler table  as scheduler_config.json has it
---@return Pipeline
function M.pipeline(r, name, network, scheduler)
  local tokenizer = shelf.tokenizer "scene-clip"
  ty.tokenizer.fields(tokenizer).max_length = r.args.length
  return { class = name == "unet" and "StableDiffusionPipeline" or "StableDiffusion3Pipeline", components = {
    [name] = network, vae = shelf.load("scene-vae", { device = r.device }), tokenizer = tokenizer,
    text_encoder = text_encoder_of(shelf.load("scene-clip")):to(r.device), scheduler = scheduler } }
end

-- Latents of the scenes that are trained on, tokens [n, 2, t] of two captions of each, of which the second names a
-- place, and, of side * side cells, what is on top in each as bytes, and what each object is called; kept in a file of
-- the results, which other seeds share.
local function data_of(r, painter, side)
  local args = r.args
  local path = r:path(("scenes-%s%s-%s.safetensors"):format(drawings.name(args), side and "-" .. side or "",
    shelf.version "scene-vae"))
  if not ty.io.exists(path) then
    local set = drawings.set(args, "training", side and { "image", "caption", "owner", "boxes", "scene" }
      or { "image", "caption" })
    local placed = drawings.set(args, "training", { "caption" }, { placed = true })
    local lists = { latents = {}, tokens = {}, shares = {}, numbers = {}, colours = {}, phrases = {} }
    for start = 0, args.scenes - 1, 100 do
      local positions = ty.arange(start, math.min(start + 100, args.scenes))
      local batch = set:batch(positions)
      table.insert(lists.latents, (ty.scope(function()
        return painter:encode(batch.image):to { dtype = "f16", device = "cpu" }
      end)))
      table.insert(lists.tokens, ty.stack({ painter:tokens(batch.caption),
        painter:tokens(placed:batch(positions).caption) }, 1))
      if side then
        local shares, numbers, colours = judge.tops(batch, side)
        table.insert(lists.shares, (shares * 255):round():to "u8")
        table.insert(lists.numbers, numbers:to "u8")
        table.insert(lists.colours, colours:to "u8")
        table.insert(lists.phrases, crops.phrases(painter, batch.scene, args.most))
      end
    end
    local tensors = {}
    for name, list in pairs(lists) do tensors[name] = #list > 0 and ty.concat(list, 0) or nil end
    ty.io.save_safetensors(path, tensors)
  end
  return ty.data.TensorDataset(ty.io.load_safetensors(path, { mmap = true }))
end

--- What a painter is trained for, without captions left out: whoever trains it leaves out their tokens.
---@param painter TextToImage
---@return Objective
function M.objective(painter)
  local objective = setmetatable({}, getmetatable(painter.process.objective))
  for key, value in pairs(painter.process.objective) do objective[key] = value end
  objective.drop = 0
  return objective
end

--- What a painter is told of tokens i64 [n, t], of which a share is replaced by those of "" at random. recorded: the
-- text encoder gets gradients.
---@param painter TextToImage
---@param tokens Tensor
---@param drop number
---@param recorded? boolean
---@param empty? Tensor  tokens of "", [1, at least t], where the network is; a step that ty.compile records needs them
---@return table condition
function M.told(painter, tokens, drop, recorded, empty)
  local rows, columns = painter:default_size()
  local factor, device = painter:factor(), painter:device()
  tokens = tokens:to { device = device }
  local dropped = ty.rand({ tokens.shape[1], 1 }, { device = device }):lt(drop)
  empty = empty or painter:tokens({ "" }):to { device = device }
  tokens = ty.where(dropped, empty:narrow(1, 0, tokens.shape[2]), tokens)
  return painter.prompts:condition(tokens, { height = rows * factor, width = columns * factor }, recorded)
end

--- Puts another network, and perhaps another text encoder, into a painter. Returns it.
---@param painter TextToImage
---@param network Module
---@param encoder? Module
---@return TextToImage
function M.use(painter, network, encoder)
  local parts = painter.pipeline.components
  painter.network, painter.prompts.network = network, network
  parts[parts.unet and "unet" or "transformer"] = network:eval()
  if encoder then
    painter.text_encoder, painter.prompts.readers[1].encoder, parts.text_encoder = encoder, encoder, encoder:eval()
  end
  return painter
end

--- How a network learns besides by its objective.
---@class PainterTraining
---@field text? "new"|"tuned"  the text encoder learns as well: all of it, or what it knows already is tuned
---@field times? function  of diffusion.times, in the place of the objective's
---@field weighting? function  of diffusion.weighting, in the place of the objective's
---@field placed? number  the share of captions that name a place, where scenes have two (0.5)
---@field cells? { module: fun(network: Module): Module, width: integer, side: integer, weight: number }  the maps
---  [n, width, side, side], or patches [n, side * side, width], that a module inside of the network makes have to say
---  what is on top in each cell of the scene, as an error with that weight
---@field layout? { steps: integer, batch: integer }  after the windows it learns, by its cells and from noise alone,
---  where captions put things, the text encoder with it
---@field crops? { steps: integer, batch: integer, beside: integer }  it learns windows around single objects first, so
---  many in a step, and then some beside scenes: see zoo.crops
---@field alone? { steps: integer, batch: integer }  then it learns scenes alone, so many in a step, the words at rest

-- The loss of a batch. With cells, a layer reads from maps in the middle of the network which object, and which tint of
-- it, is on top in each cell of the scene: so the network learns early where the caption's words belong, while shapes
-- are still blobs, and shapes are learnt of known things. Yu et al. 2025, "Representation Alignment for Generation:
-- Training Diffusion Transformers Is Easier Than You Think", has features of another network in the place of labels.
local function loss_of(painter, objective, o)
  local drop, empty = painter.process.objective.drop, painter:tokens({ "" }):to { device = painter:device() }
  return function(m, batch)
    local encoder = painter.prompts.readers[1]
    encoder.encoder = m.text_encoder or encoder.encoder
    local seen
    local unhook = o.cells and o.cells.module(m.network):register_forward_hook(function(_, outputs)
      seen = ty.is_grad_enabled() and outputs[1] or ty.keep(outputs[1])
    end)
    local loss = objective:loss(m.network, batch.latents:to "f32", M.told(painter, batch.tokens, drop,
      o.text ~= nil, empty))
    if not o.cells then return loss end
    unhook()
    local said = m.cells(seen.ndim == 4 and seen:flatten(2):transpose(1, 2) or seen)
    local of_cells = judge.cell_loss(said, judge.spread(batch.shares:to "f32" / 255, batch.numbers:to "i64",
      batch.colours:to "i64"))
    return loss + of_cells * o.cells.weight, { pictures = loss:detach(), cells = of_cells:detach() }
  end
end

-- A batch with one of the two captions of each scene, drawn at random: so many in one are those that name a place.
local function say(batch, share)
  local tokens, few = batch.tokens, {}
  if tokens.ndim == 2 then return batch end -- there is one
  for name, x in pairs(batch) do few[name] = x end
  local placed = ty.rand({ tokens.shape[1], 1 }, { device = tokens.device }):lt(share)
  few.tokens = ty.where(placed, tokens:select(1, 1), tokens:select(1, 0))
  return few
end

-- The first rows of a batch of tensors.
local function first_of(batch, count)
  local few = {}
  for name, x in pairs(batch) do few[name] = x:narrow(0, 0, math.min(count, x.shape[1])) end
  return few
end

-- The names of the tensors that every one of some batches has, in order.
local function fields_of(views)
  local fields = {}
  for name in pairs(views[1]) do
    if views[#views][name] then fields[#fields + 1] = name end
  end
  table.sort(fields)
  return fields
end

-- The tensors of batches one after another. Arguments that share memory would be an error.
local function flat(views, fields)
  local list = {}
  for i, batch in ipairs(views) do
    for _, name in ipairs(fields) do list[#list + 1] = i > 1 and batch[name]:clone() or batch[name] end
  end
  return list
end

-- The batches of such a list.
local function batches_of(list, fields)
  local views = {}
  for start = 0, #list - 1, #fields do
    local batch = {}
    for j, name in ipairs(fields) do batch[name] = list[start + j] end
    views[#views + 1] = batch
  end
  return views
end

-- A step's gradients from a loss of parts and a batch, recorded once and replayed (ty.compile), which gives the numbers
-- of calling it in four fifths of the time. view: a function from a batch to those whose losses count, each alike.
local function recorded(loss, view)
  local fields, step
  local values -- the names of what a step returns beside its loss, which are known once it is recorded
  local function record(parts)
    return ty.compile(function(...)
      local views, sum, numbers = batches_of({ ... }, fields), 0, {}
      for i, batch in ipairs(views) do
        local one, more = loss(parts, batch)
        sum = sum + one / #views
        for name, x in pairs(more or {}) do numbers[i > 1 and name .. i or name] = x end
      end
      sum:backward()
      local results = { sum:detach() }
      values = {}
      for name in pairs(numbers) do values[#values + 1] = name end
      table.sort(values)
      for j, name in ipairs(values) do results[j + 1] = numbers[name] end
      return table.unpack(results)
    end)
  end
  return function(parts, next_batch)
    local views = view(next_batch())
    fields = fields or fields_of(views)
    step = step or record(parts)
    local results = { step(table.unpack(flat(views, fields))) }
    local numbers = { loss = results[1] }
    for j, name in ipairs(values) do numbers[name] = results[j + 1] end
    return numbers
  end
end

-- Trains parts of a painter and returns them with averaged weights. more: options of train.fit besides those of all,
-- and view, see recorded().
local function fit_parts(r, painter, parts, loader, seed, o, more)
  local objective = M.objective(painter)
  objective.times = o.times or objective.times
  objective.weighting = o.weighting or objective.weighting
  local options = scenes.fit_options(r, seed, {
    optimizer = function(model, how)
      how.tuned = o.text == "tuned" and "text_encoder." or nil
      return scenes.muon(model, how)
    end,
    backward = recorded(loss_of(painter, objective, o), function(batch)
      batch = say(batch, o.placed or 0.5)
      return more.view and more.view(batch) or { batch }
    end) })
  for key, value in pairs(more) do
    if key ~= "view" then options[key] = value end
  end
  return select(2, ty.train.fit(parts, loader, options))
end

-- Where captions put things is to be learnt where there is nothing to see but noise, and the text encoder of a CLIP,
-- whose captions seldom need it, hardly tells "left" from "right". Among all times that is so rare that after hours
-- things were anywhere: what a network makes of words alone has to be learnt by itself, in some hundred steps in the
-- first of which nothing happens. Then it stays.
local only_noise = diffusion.times.logit_normal { mean = 5, std = 1 }

--- Trains a painter's network, keeps the pipeline with averaged weights in the folder of its seed, and puts these into
-- the painter. set: of latents and tokens, [n, t] or [n, 2, t] (of two captions, the second names a place; with cells,
-- of what judge.tops() gives as bytes as well, and for crops of phrases). evaluate(step): numbers for the log.
---@param r Recipe
---@param painter TextToImage
---@param set Dataset
---@param seed integer
---@param evaluate fun(step: integer): table<string, number>
---@param training? PainterTraining
function M.fit(r, painter, set, seed, evaluate, training)
  local o = training or {}
  if (o.crops or o.layout) and not o.cells then
    arguments.fail "painter.fit: training: expected cells with crops or layout, got none"
  end
  r:say("seed %d: %d parameters", seed, painter.network:count_parameters())
  local parts = nn.ModuleDict { network = painter.network, text_encoder = o.text and painter.text_encoder or nil,
    cells = o.cells and r:place(function() return nn.Linear(o.cells.width, judge.cell_outputs) end) or nil }
  local function loader(batch)
    return ty.data.DataLoader(set, { batch_size = batch, shuffle = true, seed = seed, drop_last = true,
      device = r.device })
  end
  -- A part of training with a checkpoint and a log of its own; of no steps it leaves what is taught as it is.
  local function phase(name, taught, how, batch, more)
    if more.steps == 0 then return taught end
    local folder = r:path("seed" .. seed)
    more.folder, more.log = folder .. "/checkpoint-" .. name, folder .. "/" .. name
    return fit_parts(r, painter, taught, loader(batch), seed, how, more)
  end
  if o.crops then
    parts:load_state_dict(phase("crops", parts, o, o.crops.batch, { steps = o.crops.steps, every = 0, final = 0.3,
      view = function(batch) return { crops.draw(batch) } end }):state_dict())
  end
  if o.layout then
    local how = { text = o.text and "new", times = only_noise, placed = 0.9,
      cells = { module = o.cells.module, weight = 1 } }
    parts:load_state_dict(phase("layout", parts, how, o.layout.batch, { steps = o.layout.steps, lr = r.args.lr / 2,
      every = 0, average = 0.99, final = 0.3 }):state_dict())
  end
  local beside = o.crops and o.crops.beside or 0
  local averaged = fit_parts(r, painter, parts, loader(math.max(r.args.batch, beside)), seed, o, {
    view = beside > 0 and function(batch)
      return { first_of(batch, r.args.batch), crops.draw(first_of(batch, beside)) }
    end or nil,
    evaluate = function(step, m)
      M.use(painter, m.network, m.text_encoder)
      return evaluate(step)
    end })
  M.use(painter, averaged.network, averaged.text_encoder)
  if o.alone then
    parts:load_state_dict(averaged:state_dict())
    local how = { times = o.times, weighting = o.weighting, placed = o.placed, cells = o.cells }
    averaged = phase("alone", nn.ModuleDict { network = parts.network, cells = parts.cells }, how, o.alone.batch, {
      steps = o.alone.steps, evaluate = function(step, m)
        M.use(painter, m.network)
        return evaluate(step)
      end })
    M.use(painter, averaged.network)
  end
  hub.save_pipeline(scenes.folder(r, seed), painter.pipeline)
end

--- Trains a network as part of a pipeline that draws scenes, keeps it, and returns the painter.
---@param r Recipe
---@param name string      "unet" or "transformer"
---@param network Module
---@param scheduler table
---@param seed integer
---@param training? PainterTraining
---@return TextToImage
function M.train(r, name, network, scheduler, seed, training)
  local args, cells = r.args, training and training.cells
  local painter = diffusion.TextToImage(M.pipeline(r, name, network, scheduler))
  M.fit(r, painter, data_of(r, painter, cells and cells.side), seed, function(step)
    local count = math.min(100, args.count)
    local drawn = drawings.measure(r, painter, "validation", count, args.count)
    drawn.placed = drawings.placed(r, painter, "validation", count, args.count)
    r:say("step %d: of what captions ask for objects %.3f, colours %.3f, places %.3f, of single things %.3f; captions "
      .. "found %.3f", step, drawn.object or 0, drawn.colour or 0, drawn.place or 0, drawn.placed or 0, drawn.caption)
    return drawn
  end, training)
  return painter
end

--- Trains a network for each seed and measures what it draws: the rows of the recipe's table. make() gives a network;
-- pictures of the first seed go to the recipe's picture.
---@param r Recipe
---@param name string
---@param make fun(): Module
---@param scheduler table
---@param training? PainterTraining
---@return RecipeRow[]
function M.rows(r, name, make, scheduler, training)
  local found = {}
  drawings.options(r.args) -- before hours of training: an interval that is none is an error
  local shipped = scenes.shipped(r, r.seeds[1], hub.pipeline)
  drawings.judge(r) -- before all seeds, since tuning draws random numbers
  for i, seed in ipairs(r.seeds) do
    ty.manual_seed(seed)
    local painter = i == 1 and shipped and diffusion.TextToImage(shipped)
      or M.train(r, name, make():to(r.device), scheduler, seed, training)
    local pictures
    found[i], pictures = drawings.figures(r, painter)
    if i == 1 then
      local few = pictures:narrow(0, 0, math.min(24, pictures.shape[1]))
      ty.plot.grid(scenes.pictures(few), { columns = 8, scale = 2 }):save(r:picture(r.name:match "[^/]+$" .. ".png"))
    end
  end
  return drawings.rows(found)
end

--- Writes the first seed's pipeline in half precision.
---@param r Recipe
---@param folder string
function M.write(r, folder)
  local pipeline = hub.pipeline(scenes.folder(r), { dtype = "f16" })
  hub.save_pipeline(folder, pipeline)
end

return M
