--- The pictures of TextToImage:paint: sizes, seeds, guidance, what is known of a picture that is changed, and the
-- sampler over batches of prompts.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local conditions = require "tycho.diffusion.condition"
local controlled = require "tycho.diffusion.controlled"
local finite = require "tycho.diffusion.finite"
local guidances = require "tycho.diffusion.guidance"
local inpaint = require "tycho.diffusion.inpaint"
local prompting = require "tycho.diffusion.prompts"
local seeded = require "tycho.diffusion.seeds"

local fail, none = arguments.fail, arguments.none
local WHO = "TextToImage:paint"

local defaults = { steps = 20, guidance = 4.0, rescale = 0, seed = 0, negative = "", width = none, height = none,
  frames = none, solver = none, parts = {}, batch = 32, on_step = none, noise = none, image = none, mask = none,
  strength = none, controls = {} }
local kinds = { steps = "an integer >= 1", guidance = "a finite number or a table",
  rescale = "a number in [0, 1]", seed = "an integer or a list of integers",
  negative = "a string or a list of strings", width = "an integer >= 1",
  height = "an integer >= 1", frames = "an integer >= 1", batch = "an integer >= 1", solver = "a table",
  parts = "a table", on_step = "a function", noise = "a tensor",
  image = "a tensor", mask = "a tensor", strength = "a number in (0, 1]", controls = "a list of tables" }

-- Rows and columns of the latents that pictures of a size have.
local function latent_size(painter, o)
  local factor, unit = painter:factor(), painter.prompts.unit
  local default, sides = { painter:default_size() }, {}
  for i, key in ipairs { "height", "width" } do
    local side = o[key] or o.image and o.image.shape[i + 2] or default[i] * factor
    if side % (factor * unit) ~= 0 then
      fail("%s: %s: expected a multiple of the autoencoder's %d%s, got %d", WHO, key, factor,
        unit > 1 and (" times the network's %d"):format(unit) or "", side)
    end
    sides[i] = side // factor
  end
  return sides[1], sides[2]
end

-- One of each for every prompt: a list of that many, or of one value, repeated (step 0) or counted up.
local function one_each(what, value, n, step)
  if type(value) == "table" then
    if #value ~= n then fail("%s: %s: expected %d, one for each prompt, got %d", WHO, what, n, #value) end
    return value
  end
  local list = {}
  for i = 1, n do list[i] = step and value + (i - 1) * step or value end
  return list
end

-- ---- pictures that are given ----

local function check_picture(what, x, n, channels)
  local ok = x.ndim == 4 and (x.shape[1] == n or x.shape[1] == 1) and x.shape[2] == channels
  if not ok then
    fail("%s: %s: expected [%s, %d, height, width], got %s", WHO, what, n == 1 and "1" or "1 or " .. n, channels,
      arguments.describe(x))
  end
end

local function rows_of(x, start, count)
  return x and (x.shape[1] == 1 and x:expand { count, x.shape[2], x.shape[3], x.shape[4] }
    or x:narrow(0, start - 1, count))
end

-- What is known of the picture that is changed: its latents, the mask's at their size, and what the network sees of
-- both where it was trained to.
local function read_picture(painter, o, n)
  local latents = painter.autoencoder.config.latent_channels
  local inpaints = (painter.network.config.in_channels or latents) == 2 * latents + 1
  if inpaints and not (o.image and o.mask) then
    fail("%s: %s: expected one, for a network that paints parts anew, got nil", WHO, o.image and "mask" or "image")
  end
  if o.mask and not o.image then fail("%s: image: expected one beside mask, got nil", WHO) end
  if not o.image then return {} end
  check_picture("image", o.image, n, 3)
  local image = o.image:to { device = painter:device() }
  if image.dtype == "u8" then image = image:to "f32" / 127.5 - 1 end
  if image.shape[3] ~= o.told.height or image.shape[4] ~= o.told.width then
    fail("%s: image: expected pictures of %d x %d, as height and width say, got %s", WHO, o.told.height, o.told.width,
      arguments.describe(o.image))
  end
  local known = { latents = painter:encode(image), inpaints = inpaints }
  if o.mask then
    check_picture("mask", o.mask, n, 1)
    if o.mask.shape[3] ~= o.told.height or o.mask.shape[4] ~= o.told.width then
      fail("%s: mask: expected the size of image, %d x %d, got %s", WHO, o.told.height, o.told.width,
        arguments.describe(o.mask))
    end
    local mask = o.mask:to { dtype = "f32", device = image.device }:ge(0.5):to "f32"
    known.mask = ty.interpolate(mask, { size = { o.shape[3], o.shape[4] }, mode = "nearest" })
    if inpaints then known.masked = painter:encode(image * (1 - mask)) end
  end
  return known
end

-- The network with those that control it, and their pictures [n, channels, height, width] from 0 to 1 on its device.
local function with_controls(painter, o, n)
  if #o.controls == 0 then return painter.network, nil end
  local controls, pictures = {}, {}
  for i, given in ipairs(o.controls) do
    local control = arguments.read(("%s: controls[%d]"):format(WHO, i), given, {
      net = painter.pipeline.components.controlnet or none, picture = none, strength = 1 },
      { net = "a module", picture = "a tensor", strength = "a finite number" })
    local x = control.picture
    if not x or x.ndim < 3 or x.ndim > 4 or x.ndim == 4 and x.shape[1] ~= n and x.shape[1] ~= 1
        or x.shape[x.ndim - 1] ~= o.told.height or x.shape[x.ndim] ~= o.told.width then
      fail("%s: controls[%d].picture: expected [channels, %d, %d], or %d of them, got %s", WHO, i, o.told.height,
        o.told.width, n, arguments.describe(x))
    end
    if x.ndim == 3 then x = x:unsqueeze(0) end
    x = (x.dtype == "u8" and x:to "f32" / 255 or x):to { device = painter:device(),
      dtype = prompting.dtype(painter.network) }
    pictures[i] = x:expand(n, x.shape[2], x.shape[3], x.shape[4])
    controls[i] = { net = control.net, strength = control.strength }
  end
  return controlled(painter.network, controls), pictures
end

-- ---- guidance ----

-- The guidance of the sampler, which has none where the network is told how strong it is to be.
local function guidance_of(painter, o)
  if painter.prompts.guided then
    if type(o.guidance) ~= "number" then
      fail("%s: guidance: expected a number, which the network is told, got %s", WHO, arguments.describe(o.guidance))
    end
    return nil
  end
  if type(o.guidance) == "table" then return o.guidance end
  return guidances.classifier_free { scale = o.guidance, rescale = o.rescale }
end

-- The condition that guidance pushes away from, of the prompts from `start` on: one row where all are the same.
local function null_of(painter, o, start, count)
  if not o.guide or o.guidance == 1 then return nil end
  local negatives, same = table.move(o.negatives, start, start + count - 1, 1, {}), true
  for _, negative in ipairs(negatives) do same = same and negative == negatives[1] end
  return painter:null(same and negatives[1] or negatives, o.told)
end

-- ---- painting ----

-- A part for networks whose weights are halves: they see the sample as such, while the steps are taken in f32.
local function in_dtype(dtype)
  return { call = function(_, _, next, request)
    local seen = {}
    for key, value in pairs(request) do seen[key] = value end
    seen.x = request.x:to(dtype)
    return next(seen):to(request.x.dtype)
  end }
end

-- The latents of the prompts from `start` on, one batch.
local function paint_batch(painter, o, known, start, part)
  local count = #part
  local seeds = table.move(o.seeds, start, start + count - 1, 1, {})
  local noise = o.noise and o.noise:narrow(0, start - 1, count)
    or seeded.noise(seeds)(0, ty.empty { count, table.unpack(o.shape, 2) })
  noise = noise:to { device = painter:device() }
  local parts, x = table.move(o.parts, 1, #o.parts, 1, {}), nil
  local latents = rows_of(known.latents, start, count)
  if latents then
    local first, mask = o.points[1], rows_of(known.mask, start, count)
    if not mask or o.strength < 1 then x = o.process.schedule:mix(latents, noise, first.alpha, first.sigma) end
    if known.inpaints then
      table.insert(parts, inpaint.channels(mask, rows_of(known.masked, start, count)))
    elseif mask then
      table.insert(parts, 1, inpaint.keep(latents, mask, noise))
    end
  end
  local dtype = prompting.dtype(painter.network)
  table.insert(parts, finite.part(WHO, painter.network))
  if dtype ~= noise.dtype then table.insert(parts, in_dtype(dtype)) end
  local condition = painter:condition(part, o.told)
  if o.seen then condition.controls = conditions.narrow(o.seen, start - 1, count) end
  local sampler = o.process:sampler { guidance = o.guide, steps = o.steps, solver = o.solver, parts = parts }
  return (sampler:sample(o.network, noise.shape, { condition = condition, null = null_of(painter, o, start, count),
    keep = { controls = true }, points = o.points, noise = noise, x = x, seeds = seeds, on_step = o.on_step }))
end

--- See TextToImage:paint.
---@param painter TextToImage
---@param prompts string[]
---@param options? table
---@return Tensor pictures
---@return Tensor latents
return function(painter, prompts, options)
  local o, n = arguments.read(WHO, options, defaults, kinds), #prompts
  if o.image and o.image.ndim ~= 4 then check_picture("image", o.image, n, 3) end
  local rows, columns = latent_size(painter, o)
  o.shape = { n, painter.autoencoder.config.latent_channels, rows, columns }
  local frames = painter:default_frames()
  if frames then
    table.insert(o.shape, 3, o.frames or frames)
    if o.image then fail("%s: image: expected nil for a network that draws clips, got one", WHO) end
  elseif o.frames then
    fail("%s: frames: expected nil for a network that draws single pictures, got %d", WHO, o.frames)
  end
  if o.noise and table.concat(o.noise.shape, ", ") ~= table.concat(o.shape, ", ") then
    fail("%s: noise: expected [%s], got [%s]", WHO, table.concat(o.shape, ", "), table.concat(o.noise.shape, ", "))
  end
  o.guide = guidance_of(painter, o)
  o.told = { height = rows * painter:factor(), width = columns * painter:factor(),
    guidance = type(o.guidance) == "number" and o.guidance or nil }
  o.seeds, o.negatives = one_each("seed", o.seed, n, 1), one_each("negative", o.negative, n)
  o.strength = o.strength or o.mask and 1 or 0.8
  o.process = painter.scheduler.use_dynamic_shifting and painter.prompts:process(rows, columns, painter.scheduler)
    or painter.process
  local known = read_picture(painter, o, n)
  local points = o.process:sampler { steps = o.steps, solver = o.solver }:points()
  local left = known.latents and math.min(math.floor(o.steps * o.strength), o.steps) or o.steps
  if left < 1 then fail("%s: strength: expected one that leaves a step of %d, got %s", WHO, o.steps, o.strength) end
  o.points = table.move(points, o.steps - left + 1, #points, 1, {})
  o.network, o.seen = with_controls(painter, o, n)
  local pictures, latents = {}, {}
  for start = 1, n, o.batch do
    local part = table.move(prompts, start, math.min(start + o.batch - 1, n), 1, {})
    pictures[#pictures + 1], latents[#latents + 1] = ty.scope(function()
      local x = paint_batch(painter, o, known, start, part)
      return painter:decode(x), x
    end)
  end
  return ty.concat(pictures, 0), ty.concat(latents, 0)
end
