--- How well pictures and texts find one another: a picture's caption among others, a caption's picture, the class of a
-- picture among the names of classes.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local contrastive = require "tycho.vlm.contrastive"

local nn = ty.nn
local expect = arguments.expect
local M = {}

-- Unit features [n, d] of rows, some at a time.
local function features(count, size, fn)
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
-- the picture of a caption in the same way. pictures [n, channels, height, width] (or volumes, [n, channels, depth,
-- height, width], where the model takes such), captions i64 [n, t], row by row;
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
function M.retrieval(model, pictures, captions, options)
  local who = "vlm.retrieval"
  contrastive.check_model(who, model)
  arguments.expect(who, "pictures", pictures, "a tensor")
  arguments.expect(who, "captions", captions, "a tensor")
  local o = arguments.read(who, options, { among = 100, mask = arguments.none, seed = 0, batch = 128 },
    { among = "an integer >= 2", mask = "a tensor", seed = "an integer", batch = "an integer >= 1" })
  if pictures.ndim ~= 4 and pictures.ndim ~= 5 or captions.ndim ~= 2 or pictures.shape[1] ~= captions.shape[1] then
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
    local image = features(n, o.batch, function(start, count)
      return model:image_features(part(pictures, start, count))
    end)
    local text = features(n, o.batch, function(start, count)
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

-- An error of `who` unless both are matrices of the same width with at least a row.
local function check_pair(who, a, b, name_a, name_b)
  expect(who, name_a, a, "a tensor")
  expect(who, name_b, b, "a tensor")
  if a.ndim ~= 2 or b.ndim ~= 2 or a.shape[2] ~= b.shape[2] or a:numel() == 0 or b:numel() == 0 then
    arguments.fail("%s: expected %s and %s [rows, d] of the same d, got %s and %s", who, name_a, name_b,
      arguments.describe(a), arguments.describe(b))
  end
end

-- An error of `who` unless x is i64 [count] of numbers from 0 below `least_over`.
local function check_numbers(who, name, x, count, below)
  expect(who, name, x, "a tensor")
  if x.ndim ~= 1 or x.shape[1] ~= count or x.dtype ~= "i64" then
    arguments.fail("%s: %s: expected i64 [%d], got %s", who, name, count, arguments.describe(x))
  elseif x:min():item() < 0 or x:max():item() >= below then
    arguments.fail("%s: %s: expected numbers from 0 to %d, got %d to %d", who, name, below - 1, x:min():item(),
      x:max():item())
  end
end

-- The means of recall() over groups of `size` rows.
local function in_groups(image, text, size, at)
  local sums, groups = { captions = {}, pictures = {} }, image.shape[1] // size
  for start = 0, (groups - 1) * size, size do
    local shares = M.recall(image:narrow(0, start, size), text:narrow(0, start, size), { at = at })
    for key, sum in pairs(sums) do
      for _, k in ipairs(at) do sum[k] = (sum[k] or 0) + shares[key][k] end
    end
  end
  for _, sum in pairs(sums) do
    for k, value in pairs(sum) do sum[k] = value / groups end
  end
  return sums
end

--- Recall among all, of features that are there already: image [n, d], text [m, d] (cosines count). options: owner (i64
-- [m]: the picture that each text is of; by default text j is of picture j), so that a picture may have several right
-- texts; at ({ 1, 5, 10 }); among (all: groups of so many pictures and their texts one after another, of which the
-- shares' mean is returned; what is left over does not count; without owner). Returns { captions = shares of pictures
-- with one of their texts among the k best, pictures = shares of texts whose picture is among the k best }, each by
-- k. Pictures without a text do not count.
---@param image Tensor
---@param text Tensor
---@param options? {owner?: Tensor, at?: integer[], among?: integer}
---@return {captions: table<integer, number>, pictures: table<integer, number>}
function M.recall(image, text, options)
  local who = "vlm.recall"
  check_pair(who, image, text, "image", "text")
  local o = arguments.read(who, options, { owner = arguments.none, at = { 1, 5, 10 }, among = arguments.none },
    { owner = "a tensor", at = "a list of integers >= 1", among = "an integer >= 1" })
  local n, m = image.shape[1], text.shape[1]
  if o.among and (o.owner or n ~= m) then
    arguments.fail("%s: among: expected as many texts as pictures and no owner, got %d and %d", who, m, n)
  elseif o.among and o.among < n then
    return in_groups(image, text, o.among, o.at)
  end
  if not o.owner and n ~= m then
    arguments.fail("%s: expected the option owner where there are %d pictures and %d texts, got none", who, n, m)
  end
  if o.owner then check_numbers(who, "owner", o.owner, m, n) end
  return ty.no_grad(ty.scope, function()
    local owner = o.owner and o.owner:to { device = image.device } or ty.arange(m, { device = image.device })
    local logits = nn.normalize(image):matmul(nn.normalize(text):transpose(0, 1))
    local right = ty.arange(n, { device = image.device }):unsqueeze(1):eq(owner:unsqueeze(0))
    local counted = right:any(1)
    local function shares(scores, own, count)
      local result = {}
      for _, k in ipairs(o.at) do
        local _, best = scores:topk(math.min(k, scores.shape[2]))
        result[k] = own:gather(1, best):any(1):to("i64"):sum():item() / count
      end
      return result
    end
    return { captions = shares(logits, right, counted:to("i64"):sum():item()),
      pictures = shares(logits:transpose(0, 1), right:transpose(0, 1), m) }
  end)
end

--- The share of pictures whose own caption is the best among so many: captions of recall() at 1.
---@param image Tensor  [n, d]
---@param text Tensor   [n, d]
---@param among? integer  (100)
---@return number
function M.found(image, text, among)
  among = expect("vlm.found", "among", among, "an integer >= 2 or nil") or 100
  return M.recall(image, text, { at = { 1 }, among = among }).captions[1]
end

--- The share of pictures whose class is found by the texts of the classes alone: image [n, d], classes [c, d] (of
-- several prompts a class, the mean of their unit features), labels i64 [n]. Radford et al. 2021, section 3.1. Returns
-- the share, and the class that was found for each picture, i64 [n].
---@param image Tensor
---@param classes Tensor
---@param labels Tensor
---@return number accuracy
---@return Tensor found
function M.zero_shot(image, classes, labels)
  local who = "vlm.zero_shot"
  check_pair(who, image, classes, "image", "classes")
  check_numbers(who, "labels", labels, image.shape[1], classes.shape[1])
  return ty.no_grad(function()
    local best = nn.normalize(image):matmul(nn.normalize(classes):transpose(0, 1)):argmax(1)
    return best:eq(labels:to { device = image.device }):to("f32"):mean():item(), best
  end)
end

--- Prompts whose features' mean stands for a class, by its name.
M.prompts = { "a %s", "a picture of a %s", "just a %s" }

--- Vectors of classes for zero_shot(): of each class the sum of the unit features of its prompts.
---@param names string[]
---@param encode fun(texts: string[]): Tensor  [names, d] of so many texts
---@param prompts? string[]  with %s for the name; vlm.prompts
---@return Tensor [names, d]
function M.named(names, encode, prompts)
  local who = "vlm.named"
  expect(who, "names", names, "a list of strings")
  expect(who, "encode", encode, "a function")
  prompts = expect(who, "prompts", prompts == nil and M.prompts or prompts, "a list of strings")
  local sum
  for _, prompt in ipairs(prompts) do
    local texts = {}
    for i, name in ipairs(names) do texts[i] = prompt:gsub("%%s", (name:gsub("%%", "%%%%"))) end
    local x = nn.normalize(expect(who, "what encode returned", encode(texts), "a tensor"))
    sum = sum and sum + x or x
  end
  return sum or arguments.fail("%s: prompts: expected at least one, got none", who)
end

--- What fn gives for rows 0 to count - 1, some at a time, without a graph, as one tensor [count, ...]: features of a
-- frozen encoder, computed once. fn(start, rows) returns those of `rows` rows from `start` on. batch: 64 rows.
---@param count integer
---@param fn fun(start: integer, rows: integer): Tensor
---@param batch? integer
---@return Tensor
function M.embed(count, fn, batch)
  local who = "vlm.embed"
  expect(who, "count", count, "an integer >= 1")
  expect(who, "fn", fn, "a function")
  batch = expect(who, "batch", batch == nil and 64 or batch, "an integer >= 1")
  return ty.no_grad(function()
    local parts = {}
    for start = 0, count - 1, batch do
      local rows = math.min(batch, count - start)
      parts[#parts + 1] = ty.scope(function()
        local part = fn(start, rows)
        if not ty.is_tensor(part) or part.ndim == 0 or part.shape[1] ~= rows then
          arguments.fail("%s: fn: expected a tensor of %d rows, got %s", who, rows, arguments.describe(part))
        end
        return part
      end)
    end
    return ty.concat(parts, 0)
  end)
end

return M
