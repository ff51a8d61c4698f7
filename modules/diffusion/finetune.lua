--- Teaching a pipeline new things from a folder of pictures with captions: LoRA or all weights of the network (and of
-- its text encoders), with pictures of the class beside, so that it is not forgotten what the class looks like.
--
--     local set = finetune.folder("photos", { caption = "a photo of sks dog", size = 512 })
--     local losses = finetune.train(painter, set, { steps = 500, prior = { prompt = "a photo of a dog" } })
--     finetune.save(painter, "sks.safetensors")        -- a LoRA as diffusers and diffusion.lora read it
--
-- Hu et al. 2021 (LoRA); Ruiz et al. 2023, "DreamBooth: Fine Tuning Text-to-Image Diffusion Models for Subject-Driven
-- Generation" (the prior's part of the loss). A word of its own for what is learnt: diffusion.inversion.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"
local adapter = require "tycho.peft.adapter"
local pictures = require "tycho.data.pictures"

local expect, fail = arguments.expect, arguments.fail
local M = {}

-- ---- pictures and their captions ----

-- Captions by file name, as metadata.jsonl has them; an empty table where there is none.
local function listed(path)
  local captions = {}
  if not ty.io.exists(path .. "/metadata.jsonl") then return captions end
  for line in ty.io.read(path .. "/metadata.jsonl"):gmatch "[^\r\n]+" do
    local ok, row = pcall(ty.io.json_decode, line)
    if not ok or type(row) ~= "table" or type(row.file_name) ~= "string" or type(row.text) ~= "string" then
      fail("finetune.folder: %s/metadata.jsonl: expected lines with file_name and text, got %s", path,
        arguments.describe(line))
    end
    captions[row.file_name] = row.text
  end
  return captions
end

---@class PictureSet
---@field count integer
---@field captions string[]
---@field picture fun(i: integer): Tensor  the i-th, from 1, u8 [3, h, w]

--- The pictures of a folder (PNG, JPEG) with their captions: of metadata.jsonl (lines with file_name and text), of
-- NAME.txt beside NAME.png, or `caption` for all that have none. options: caption, size (512, or { height, width }:
-- each picture's largest part in the middle is made that size).
---@param path string
---@param options? { caption?: string, size?: integer|integer[] }
---@return PictureSet
function M.folder(path, options)
  local who = "finetune.folder"
  expect(who, "path", path, "a string")
  local o = arguments.read(who, options, { caption = arguments.none, size = 512 }, { caption = "a string",
    size = "an integer in [1, 65535] or a pair of integers in [1, 65535]" })
  local info = ty.io.stat(path)
  if not info or info.kind ~= "directory" then fail("%s: path: expected a folder, got %s", who, path) end
  local known, files, captions = listed(path), {}, {}
  for _, name in ipairs(ty.io.listdir(path)) do
    if pictures.endings[(name:match "%.([^.]+)$" or ""):lower()] then
      local beside = path .. "/" .. name:gsub("%.[^.]+$", ".txt")
      local caption = known[name] or ty.io.exists(beside) and ty.io.read(beside):match "^%s*(.-)%s*$" or o.caption
      if not caption then
        fail("%s: %s/%s: expected a caption in metadata.jsonl, in a .txt beside it or as option caption, got none", who,
          path, name)
      end
      files[#files + 1], captions[#captions + 1] = path .. "/" .. name, caption
    end
  end
  if #files == 0 then fail("%s: path: expected PNG or JPEG files in %s, got none", who, path) end
  return { count = #files, captions = captions, picture = function(i)
    local ok, x = pcall(pictures.decode, ty.io.read(files[i]), { size = o.size, channels = 3, crop = "center" })
    if not ok then arguments.raise(x, ("%s: %s: "):format(who, files[i])) end
    return x
  end }
end

local check_painter = require("tycho.diffusion.prompts").check_painter

local function check_set(who, what, set)
  expect(who, what, set, "a table")
  expect(who, what .. ".captions", set.captions, "a list of strings")
  expect(who, what .. ".picture", set.picture, "a function")
  if #set.captions == 0 then fail("%s: %s: expected pictures, got none", who, what) end
  return set
end

-- Latents [n, c, h, w] of all pictures, made one by one, on the processor; and the height and width of the pictures.
local function latents_of(who, painter, set)
  local list, height, width = {}, nil, nil
  for i = 1, #set.captions do
    local x = set.picture(i)
    if not ty.is_tensor(x) or x.ndim ~= 3 or x.shape[1] ~= 3 then
      fail("%s: set.picture(%d): expected [3, h, w], got %s", who, i, arguments.describe(x))
    end
    local unit = painter:factor() * painter.prompts.unit
    if x.shape[2] % unit ~= 0 or x.shape[3] % unit ~= 0 then
      fail("%s: set.picture(%d): expected a height and a width that %d divides, got %s", who, i, unit,
        arguments.describe(x))
    end
    height, width = height or x.shape[2], width or x.shape[3]
    if x.shape[2] ~= height or x.shape[3] ~= width then
      fail("%s: set.picture(%d): expected [3, %d, %d] as the first, got %s", who, i, height, width,
        arguments.describe(x))
    end
    list[i] = ty.unscoped(function() return painter:encode(x:unsqueeze(0)):to { device = "cpu" } end)
  end
  return ty.concat(list, 0), height, width
end

--- Latents [n, c, h, w] of a set's pictures, made one by one, on the processor; and the height and width that all of
-- the pictures have. who: what errors begin with.
---@param painter TextToImage
---@param set PictureSet
---@param who? string
---@return Tensor latents
---@return integer height
---@return integer width
function M.latents(painter, set, who)
  who = expect("finetune.latents", "who", who, "a string or nil") or "finetune.latents"
  check_painter(who, painter)
  return latents_of(who, painter, check_set(who, "set", set))
end

-- ---- what is trained ----

-- Where adapters go in diffusers' scripts: attention of the network, and of the text encoders.
local network_targets = { "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out" }
local text_targets = { "q_proj", "k_proj", "v_proj", "out_proj" }

-- Those of the targets that a model has.
local function present(model, targets)
  local list, seen = {}, {}
  for name, module in model:named_modules() do
    for _, target in ipairs(targets) do
      if not seen[target] and ty.nn.surgery.ends_in(name, target) and rawget(module, "weight") then
        list[#list + 1], seen[target] = target, true
      end
    end
  end
  return list
end

-- The models of a painter by their names in the pipeline: the network first.
local function models_of(painter, text)
  local components, list = painter.pipeline.components, {}
  list[1] = { name = components.unet and "unet" or "transformer", model = painter.network,
    targets = network_targets }
  for _, name in ipairs(text and { "text_encoder", "text_encoder_2" } or {}) do
    -- T5 reads words well enough as it is, and diffusers' LoRAs leave it alone.
    if components[name] and components[name].text_model then
      list[#list + 1] = { name = name, model = components[name], targets = text_targets }
    end
  end
  return list
end

local methods = '"lora" or "full"'
local defaults = { method = "lora", steps = 500, batch = 1, lr = arguments.none, warmup = 0, rank = 4,
  alpha = arguments.none, targets = arguments.none, text = false, prior = arguments.none, drop = 0, seed = 0,
  guidance = 3.5, weight_decay = 0.01, folder = arguments.none, resume = false, every = 0, evaluate = arguments.none,
  quiet = true, title = "fine-tuning" }
local kinds = { method = methods, steps = "an integer >= 1", batch = "an integer >= 1", lr = "a finite number > 0",
  warmup = "an integer >= 0", rank = "an integer >= 1", alpha = "a finite number", targets = "a list of strings",
  prior = "a table", drop = "a number in [0, 1]", seed = "an integer", guidance = "a finite number",
  weight_decay = "a finite number >= 0", folder = "a string", resume = 'a boolean or "auto"',
  every = "an integer >= 0", evaluate = "a function" }

-- Pictures of the class, drawn by the pipeline as it is, where there are none.
local function prior_of(who, painter, given, height, width)
  local o = arguments.read(who .. ": prior", given, { set = arguments.none, prompt = arguments.none, count = 100,
    weight = 1, steps = 20, seed = 0 }, { set = "a table", prompt = "a string", count = "an integer >= 1",
    weight = "a finite number >= 0", steps = "an integer >= 1", seed = "an integer" })
  if not o.set and not o.prompt then fail("%s: prior: expected a set or a prompt, got neither", who) end
  if o.set then return check_set(who, "prior.set", o.set), o.weight end
  local captions = {}
  for i = 1, o.count do captions[i] = o.prompt end
  local drawn = painter:paint(captions, { steps = o.steps, seed = o.seed, height = height, width = width, batch = 4 })
  return { captions = captions, picture = function(i) return drawn:select(0, i - 1) end }, o.weight
end

-- Batches without an end, in an order that is drawn anew each time round: i64 positions [batch].
local function loader_of(count, batch, seed)
  return ty.data.DataLoader(ty.data.TensorDataset { at = ty.arange(count) }, { batch_size = math.min(batch, count),
    shuffle = true, seed = seed, drop_last = true })
end

-- Makes a model ready to be trained: an adapter, or all weights.
local function prepare(each, o)
  if o.method == "full" then
    for _, p in ipairs(each.model:parameters()) do p:requires_grad_(p:is_floating_point()) end
    return
  end
  local targets = not each.name:find "^text" and o.targets or present(each.model, each.targets)
  adapter.lora(each.model, { rank = o.rank, alpha = o.alpha or o.rank, targets = targets })
end

-- The training itself, with the generator seeded.
local function run(who, painter, set, o)
  local x, height, width = latents_of(who, painter, set)
  local prior, weight
  if o.prior then
    prior, weight = prior_of(who, painter, o.prior, height, width)
    prior = { captions = prior.captions, x = latents_of(who, painter, prior) }
  end
  local list, parts = models_of(painter, o.text), {}
  for _, each in ipairs(list) do
    prepare(each, o)
    parts[each.name] = each.model
  end
  local objective = setmetatable({}, getmetatable(painter.process.objective))
  for key, value in pairs(painter.process.objective) do objective[key] = value end
  objective.drop = o.drop
  local told = { height = height, width = width, guidance = o.guidance }
  if o.drop > 0 then objective.null = painter:null("", told) end
  -- What does not change is read once.
  local cache = {}
  local function condition_of(captions)
    if o.text then return painter.prompts:condition(captions, told, true) end
    local rows = {}
    for i, caption in ipairs(captions) do
      cache[caption] = cache[caption] or ty.unscoped(function() return painter:condition({ caption }, told) end)
      rows[i] = cache[caption]
    end
    return conditions.concat(rows)
  end
  local function loss_of(latents, captions, at)
    local chosen = {}
    for i, k in ipairs(at:tolist()) do chosen[i] = captions[k + 1] end
    local z = latents:index_select(0, at):to { device = painter:device() }
    z = z:to(painter.network:parameters()[1].dtype)
    return objective:loss(painter.network, z, condition_of(chosen))
  end
  local beside = prior and loader_of(#prior.captions, o.batch, o.seed + 1)
  local losses = ty.train.fit(ty.nn.ModuleDict(parts), loader_of(#set.captions, o.batch, o.seed), {
    steps = o.steps, lr = o.lr or (o.method == "lora" and 1e-4 or 5e-6), warmup = o.warmup, final = 1,
    weight_decay = o.weight_decay, beta2 = 0.999, folder = o.folder, resume = o.resume, every = o.every,
    evaluate = o.evaluate, quiet = o.quiet, title = o.title,
    loss = function(_, batch)
      local loss = loss_of(x, set.captions, batch.at)
      if not beside then return loss end
      local kept = loss_of(prior.x, prior.captions, beside:next().at)
      return loss + kept * weight, { new = loss:item(), prior = kept:item() }
    end })
  for _, each in ipairs(list) do each.model:eval() end
  return losses
end

--- Trains a painter's network on a set of pictures (M.folder). options:
--   method ("lora": an adapter of attention; "full": all weights), rank (4), alpha (the rank), targets (names of
--     layers)
--   text (false; true: the text encoders of CLIP's kind too)
--   steps (500), batch (1), lr (1e-4; 5e-6 for all weights), warmup (0), weight_decay (0.01), seed (0)
--   prior (nil; a table: set, or prompt and count (100) of which pictures are drawn first, with steps (20) and seed
--     (0); weight (1) of its part of the loss)
--   drop (0: share of pictures whose caption is left out), guidance (3.5: what networks like Flux are told)
--   folder, resume, every, evaluate, title, quiet: as of train.fit
-- Returns the loss of every step. The painter draws what was learnt; an adapter stays on it: finetune.save,
-- peft.remove.
---@param painter TextToImage
---@param set PictureSet
---@param options? table
---@return number[] losses
function M.train(painter, set, options)
  local who = "finetune.train"
  check_painter(who, painter)
  check_set(who, "set", set)
  local o = arguments.read(who, options, defaults, kinds)
  return ty.data.with_seed(o.seed, function() return run(who, painter, set, o) end)
end

--- Writes the adapters that train() left on a painter: one file as diffusers' pipelines and diffusion.lora read it,
-- with rank and alpha in its metadata.
---@param painter TextToImage
---@param path string  ends in .safetensors
function M.save(painter, path)
  local who = "finetune.save"
  check_painter(who, painter)
  expect(who, "path", path, "a string")
  local state, settings, any = {}, {}, false
  for _, each in ipairs(models_of(painter, true)) do
    local record = rawget(each.model, "_adapter")
    if record then
      any = true
      local names = {}
      for i, layer in ipairs(record.layers) do
        local name = ("%s.%s."):format(each.name, layer.name)
        state[name .. "lora_A.weight"] = layer.module.lora_A.weight:detach()
        state[name .. "lora_B.weight"] = layer.module.lora_B.weight:detach()
        names[i] = layer.name
      end
      settings[each.name .. ".r"], settings[each.name .. ".lora_alpha"] = record.rank, record.alpha
      -- Ends of names where they were asked for: what stands before differs between versions of transformers.
      settings[each.name .. ".target_modules"] = record.targets or names
    end
  end
  if not any then fail("%s: painter: expected one with adapters, as finetune.train leaves them, got none", who) end
  ty.io.save_safetensors(path, state, { format = "pt", lora_adapter_metadata = ty.io.json_encode(settings) })
end

return M
