--- How well a model finds a picture's caption among others, and a caption's picture.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local contrastive = require "tycho.vlm.contrastive"

local nn = ty.nn

-- Unit features [n, d] of rows, some at a time.
local function features(rows, count, size, fn)
  local parts = {}
  for start = 0, count - 1, size do
    parts[#parts + 1] = ty.scope(function() return nn.normalize(fn(start, math.min(size, count - start))) end)
  end
  return ty.concat(parts, 0)
end

-- Shares of the rows of logits [n, n] whose own column, or one that is the same, is the highest, and among the five
-- highest. same: bool [n, n]; rows: how many of them count.
local function found(logits, same, rows)
  local _, highest = logits:narrow(0, 0, rows):topk(math.min(5, logits.shape[2]))
  local best = same:narrow(0, 0, rows):gather(1, highest)
  return best:select(1, 0):to("i64"):sum():item(), best:any(1):to("i64"):sum():item()
end

--- How often a model finds the caption of a picture among `among` captions, its own with others drawn at random, and
-- the picture of a caption in the same way. pictures [n, channels, height, width], captions i64 [n, t], row by row;
-- captions of the same tokens count as one. options: among (100), mask (of the captions, bool or i64 [n, t]), seed (0:
-- which others), batch (128: rows at a time). Returns a table with
--   captions, pictures                shares of pictures whose caption is found, and of captions whose picture is
--   captions_in_5, pictures_in_5      of those for which it is among the five best
--   among, count                      the size of a group, and how many pictures
---@param model CLIPModel
---@param pictures Tensor
---@param captions Tensor
---@param options? {among?: integer, mask?: Tensor, seed?: integer, batch?: integer}
---@return table
return function(model, pictures, captions, options)
  local who = "vlm.retrieval"
  contrastive.check_model(who, model)
  arguments.expect(who, "pictures", pictures, "a tensor")
  arguments.expect(who, "captions", captions, "a tensor")
  local o = arguments.read(who, options, { among = 100, mask = arguments.none, seed = 0, batch = 128 },
    { among = "an integer >= 2", mask = "a tensor", seed = "an integer", batch = "an integer >= 1" })
  if pictures.ndim ~= 4 or captions.ndim ~= 2 or pictures.shape[1] ~= captions.shape[1] then
    arguments.fail("%s: expected pictures [n, channels, height, width] and captions [n, t], got %s and %s", who,
      arguments.describe(pictures), arguments.describe(captions))
  end
  local n, device = pictures.shape[1], model:device()
  if n < o.among then
    arguments.fail("%s: among: expected at most the %d pictures that there are, got %d", who, n, o.among)
  end
  local training, state = model.training, ty.rng_state()
  ty.manual_seed(o.seed)
  local order = ty.randperm(n)
  ty.rng_state(state)
  model:eval()
  local function part(x, start, count)
    return x:index_select(0, order:narrow(0, start, count):to { device = x.device }):to { device = device }
  end
  local sums = { 0, 0, 0, 0 }
  local ok, problem = pcall(ty.no_grad, ty.scope, function()
    local image = features(pictures, n, o.batch, function(start, count)
      return model:image_features(part(pictures, start, count))
    end)
    local text = features(captions, n, o.batch, function(start, count)
      return model:text_features(part(captions, start, count), { mask = o.mask and part(o.mask, start, count) })
    end)
    local tokens = part(captions, 0, n)
    -- Groups of `among` in the drawn order; the last one is filled up from the beginning, whose rows do not count
    -- again.
    for start = 0, n - 1, o.among do
      local count = math.min(o.among, n - start)
      local function group(x)
        if count == o.among then return x:narrow(0, start, count) end
        return ty.concat({ x:narrow(0, start, count), x:narrow(0, 0, o.among - count) }, 0)
      end
      local logits, row = group(image):matmul(group(text):transpose(0, 1)), group(tokens)
      local same = row:unsqueeze(0):eq(row:unsqueeze(1)):all(-1)
      for i, share in ipairs { found(logits, same, count) } do sums[i] = sums[i] + share end
      for i, share in ipairs { found(logits:transpose(0, 1), same, count) } do sums[2 + i] = sums[2 + i] + share end
    end
  end)
  model:train(training)
  if not ok then error(problem, 0) end
  return { captions = sums[1] / n, captions_in_5 = sums[2] / n, pictures = sums[3] / n, pictures_in_5 = sums[4] / n,
    among = o.among, count = n }
end
