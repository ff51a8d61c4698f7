--- Volumes, the codes of their diagnoses and their reports: a network of three dimensions that begins as one of two,
-- learns codes and reports at once, and finds by words what it was never asked for. Blankemeier et al. 2024, "Merlin:
-- A Vision Language Foundation Model for 3D Computed Tomography"; weights are inflated as in Carreira and Zisserman
-- 2017, "Quo Vadis, Action Recognition? A New Model and the Kinetics Dataset".
--
--     local merlin = vlm.merlin
--     local network = merlin.inflate(flat)                   -- flat: a ResNet3d that sees each slice by itself
--     local model = merlin.Model { image = network, text = clip_text, width = 64 }
--     local loss = merlin.loss(model, { volumes = volumes, codes = codes, tokens = tokens })
--     local score = merlin.present(model:image_features(volumes), present, absent)         -- > 0: it is there
local ty = require "tycho"
local arguments = require "tycho.arguments"
local models = require "tycho.models"
local retrieval = require "tycho.vlm.retrieval"

local nn = ty.nn
local parameter = require("tycho.nn.options").parameter
local expect = arguments.expect
local M = {}

-- ---- inflation ----

--- A network of volumes that computes, slice by slice, what a network of slices does: a ResNet3d with convolution "3d"
-- and the weights of `flat`, one with convolution "space". options: spread (false: the weights go into the middle of
-- the kernel's depth and the rest is zero, as in Merlin's code, which is exact for every volume and depth; true: a
-- third of them goes to each depth, as in I3D, which is exact where volumes do not change with depth, away from their
-- ends), stem_stride (1; 2: every other slice).
---@param flat ResNet3d
---@param options? {spread?: boolean, stem_stride?: integer}
---@return ResNet3d
function M.inflate(flat, options)
  local who = "merlin.inflate"
  expect(who, "flat", flat, "a module")
  local o = arguments.read(who, options, { spread = false, stem_stride = 1 }, { stem_stride = "1 or 2" })
  local config = nn.is_module(flat) and flat.maps and flat.config or {}
  if config.convolution ~= "space" then
    arguments.fail('%s: flat: expected a ResNet3d with convolution "space", got %s', who, arguments.describe(flat))
  end
  local given = { convolution = "3d", stem_stride = o.stem_stride }
  for _, key in ipairs { "in_channels", "classes", "channels", "blocks", "stem", "small", "dropout" } do
    given[key] = config[key]
  end
  local network = models.ResNet3d(given)
  local state = flat:state_dict()
  ty.no_grad(function()
    for name, target in pairs(network:state_dict()) do
      local source = state[name]
      local depth = target.ndim == 5 and target.shape[3] or 1
      if depth == 1 then
        target:copy_(source)
      elseif o.spread then
        target:copy_((source / depth):expand(target.shape))
      else
        target:fill_(0)
        target:select(2, depth // 2):copy_(source:select(2, 0))
      end
    end
  end)
  return network:to { device = flat:device() }
end

-- ---- the network ----

--- A network of volumes and one of texts that meet in one space, and a head of codes.
---@class Merlin: Module
---@field image ResNet3d       its `fc` is the head of codes
---@field text Module
---@field logit_scale Tensor   the logarithm of the scale of the similarities
local Merlin = nn.module "Merlin"

--- options: image (a ResNet3d, or what has features() and a head `fc`), text (a CLIPTextModelWithProjection, or what
-- gives states and then a feature of each text), width (of the space: of the text's features).
---@param options { image: Module, text: Module, width: integer }
function Merlin:init(options)
  local who = "Merlin"
  local o = arguments.read(who, options, { image = arguments.none, text = arguments.none, width = 0 },
    { image = "a module", text = "a module", width = "an integer >= 0" })
  if not o.image or not o.image.features or not o.image.fc then
    arguments.fail("%s: image: expected a ResNet3d, got %s", who, arguments.describe(o.image))
  elseif not o.text then
    arguments.fail("%s: text: expected a CLIPTextModelWithProjection, got nil", who)
  elseif o.width < 1 then
    arguments.fail("%s: width: expected an integer >= 1, got %d", who, o.width)
  end
  self.image, self.text = o.image, o.text
  self.visual_projection = nn.Linear(o.image.fc.weight.shape[2], o.width, { bias = true })
  self.logit_scale = parameter({}, function(t) t:fill_(math.log(1 / 0.07)) end)
end

--- Features [n, width] and logits of codes [n, codes] of volumes [n, channels, d, h, w].
---@param volumes Tensor
---@return Tensor features
---@return Tensor logits
function Merlin:both(volumes)
  expect("Merlin:both", "volumes", volumes, "a tensor")
  local x = self.image:features(volumes)
  return self.visual_projection(x), self.image.fc(x)
end

--- Features [n, width] of volumes.
---@param volumes Tensor
---@return Tensor
function Merlin:image_features(volumes) return (self:both(volumes)) end

--- Features [n, width] of texts, tokens i64 [n, t]. options: those of the network of texts.
---@param tokens Tensor
---@param options? table
---@return Tensor
function Merlin:text_features(tokens, options)
  expect("Merlin:text_features", "tokens", tokens, "a tensor")
  local _, pooled = self.text(tokens, options)
  return pooled
end

--- Volumes [n, channels, d, h, w] to logits of codes [n, codes].
---@param volumes Tensor
---@return Tensor
function Merlin:forward(volumes) return (select(2, self:both(volumes))) end

M.Model = Merlin

-- ---- training ----

--- Which texts of a batch are the same, bool [n, n]: tokens i64 [n, t].
---@param tokens Tensor
---@return Tensor
function M.same(tokens)
  if not ty.is_tensor(tokens) or tokens.ndim ~= 2 then
    arguments.fail("merlin.same: tokens: expected an i64 tensor [n, t], got %s", arguments.describe(tokens))
  end
  return tokens:unsqueeze(0):eq(tokens:unsqueeze(1)):all(-1)
end

--- The symmetric contrast of volumes and texts in which all that have the same text belong together: of a report's
-- sections most say "normal", and a volume is not to be told from another by that. The target is spread evenly over
-- what belongs together; where no two texts are the same it is vlm.contrastive_loss (InfoNCE). image, text [n, d];
-- scale: number or tensor; same: bool [n, n].
---@param image Tensor
---@param text Tensor
---@param scale number|Tensor
---@param same Tensor
---@return Tensor loss
function M.contrast(image, text, scale, same)
  local who = "merlin.contrast"
  for name, x in pairs { image = image, text = text, same = same } do expect(who, name, x, "a tensor") end
  local n = image.shape[1]
  if image.ndim ~= 2 or text.ndim ~= 2 or text.shape[1] ~= n or text.shape[2] ~= image.shape[2] or same.ndim ~= 2
    or same.shape[1] ~= n or same.shape[2] ~= n then
    arguments.fail("%s: expected image and text [n, d] alike and same [n, n], got %s, %s and %s", who,
      arguments.describe(image), arguments.describe(text), arguments.describe(same))
  end
  if not ty.is_tensor(scale) then expect(who, "scale", scale, "a tensor or a finite number") end
  local target = same:to(image.dtype)
  target = target / target:sum({ 1 }, true)
  local logits = nn.normalize(image):matmul(nn.normalize(text):transpose(0, 1)) * scale
  local function one(x) return -(target * x:log_softmax(-1)):sum(-1):mean() end
  return (one(logits) + one(logits:transpose(0, 1))) * 0.5
end

--- Which text of a report a step reads: 0, the whole, in even steps, and in odd ones a section from 1 to `sections`, in
-- turn.
---@param step integer
---@param sections integer
---@return integer
function M.turn(step, sections)
  expect("merlin.turn", "step", step, "an integer >= 0")
  expect("merlin.turn", "sections", sections, "an integer >= 0")
  if sections == 0 or step % 2 == 0 then return 0 end
  return step // 2 % sections + 1
end

--- The loss of a batch: binary cross entropy of the codes and contrast with the texts, both from one pass. batch:
-- volumes [n, channels, d, h, w], codes f32 [n, codes], tokens i64 [n, t], mask (of the tokens; may be nil). options:
-- codes (1), reports (1): the weights of the two, of which one may be 0 and is then not computed. Returns the loss and
-- numbers for the log.
---@param model Merlin
---@param batch { volumes: Tensor, codes?: Tensor, tokens?: Tensor, mask?: Tensor }
---@param options? { codes?: number, reports?: number }
---@return Tensor loss
---@return table<string, Tensor>
function M.loss(model, batch, options)
  local who = "merlin.loss"
  expect(who, "model", model, "a module")
  expect(who, "batch", batch, "a table")
  local o = arguments.read(who, options, { codes = 1.0, reports = 1.0 },
    { codes = "a number >= 0", reports = "a number >= 0" })
  if not model.both or not ty.is_tensor(batch.volumes) then
    arguments.fail("%s: expected a Merlin and a batch with volumes, got %s and volumes %s", who,
      arguments.describe(model), arguments.describe(batch.volumes))
  elseif o.codes == 0 and o.reports == 0 then
    arguments.fail("%s: expected codes or reports above 0, got 0 for both", who)
  end
  local features, logits = model:both(batch.volumes)
  local loss, log = nil, {}
  if o.codes > 0 then
    expect(who, "batch.codes", batch.codes, "a tensor")
    local codes = nn.bce_with_logits(logits, batch.codes)
    loss, log.codes = codes * o.codes, codes:detach()
  end
  if o.reports > 0 then
    expect(who, "batch.tokens", batch.tokens, "a tensor")
    local scale = model.logit_scale:clamp(nil, math.log(100)):exp()
    local reports = M.contrast(features, model:text_features(batch.tokens, { mask = batch.mask }), scale,
      M.same(batch.tokens))
    loss, log.reports = loss and loss + reports * o.reports or reports * o.reports, reports:detach()
  end
  return loss, log
end

--- Trains a Merlin on volumes [n, channels, d, h, w], codes f32 [n, codes] and texts i64 [n, 1 + sections, t], whole
-- reports first; steps read them by turn(). options: codes and reports (1, 1: weights, see loss()), times (10: how many
-- times as fast as the rest the two heads of volumes learn, whose signal is a mean over all places), batch (24), seed
-- (0: the order), and those of train.fit. Returns the model, for evaluation.
---@param model Merlin
---@param data { volumes: Tensor, codes: Tensor, texts: Tensor }
---@param options table
---@return Merlin
function M.fit(model, data, options)
  local who = "merlin.fit"
  expect(who, "model", model, "a module")
  expect(who, "data", data, "a table")
  expect(who, "options", options, "a table")
  for _, name in ipairs { "volumes", "codes", "texts" } do expect(who, "data." .. name, data[name], "a tensor") end
  if data.texts.ndim ~= 3 then
    arguments.fail("%s: data.texts: expected i64 [n, 1 + sections, t], got %s", who, arguments.describe(data.texts))
  end
  local own, given = { codes = 1.0, reports = 1.0, times = 10.0, batch = 24, seed = 0 }, { title = "merlin" }
  local mine = {}
  for key, value in pairs(options) do
    if own[key] ~= nil then mine[key] = value else given[key] = value end
  end
  local o = arguments.read(who, mine, own, { codes = "a number >= 0", reports = "a number >= 0",
    times = "a number > 0", batch = "an integer >= 1", seed = "an integer" })
  local step, sections = -1, data.texts.shape[2] - 1
  function given.loss(network, batch)
    step = step + 1
    return M.loss(network, { volumes = batch.volumes, codes = batch.codes,
      tokens = batch.texts:select(1, M.turn(step, sections)) }, { codes = o.codes, reports = o.reports })
  end
  given.optimizer = given.optimizer or function(network, more)
    local heads, rest = {}, {}
    for name, p in network:named_parameters() do
      table.insert((name:find "^image%.fc" or name:find "^visual_projection") and heads or rest, p)
    end
    return ty.optim.AdamW({ { params = rest }, { params = heads, lr = more.lr * o.times } }, { lr = more.lr,
      beta2 = 0.95, clip_norm = more.clip_norm, schedule = more.schedule, weight_decay = 0.05 })
  end
  ty.train.fit(model, ty.data.DataLoader(ty.data.TensorDataset { volumes = data.volumes, codes = data.codes,
    texts = data.texts }, { batch_size = o.batch, shuffle = true, seed = o.seed, drop_last = true,
    device = model:device() }), given)
  return model:eval()
end

--- Rows of labels [n, classes] (1: there) such that each class, and none of them, is met equally often: i64 [about n],
-- those of a rare class again and again. What a class without rows would have had is of none.
---@param labels Tensor
---@return Tensor
function M.balanced(labels)
  local who = "merlin.balanced"
  expect(who, "labels", labels, "a tensor")
  if labels.ndim ~= 2 or labels:numel() == 0 then
    arguments.fail("%s: labels: expected [n, classes], got %s", who, arguments.describe(labels))
  end
  local lists = {}
  for k = 1, labels.shape[2] + 1 do lists[k] = {} end
  for i, row in ipairs(labels:tolist()) do
    local any = false
    for k, value in ipairs(row) do
      if value > 0 then table.insert(lists[k], i - 1) end
      any = any or value > 0
    end
    if not any then table.insert(lists[#lists], i - 1) end
  end
  local rows, count = {}, -(-labels.shape[1] // #lists)
  for _, list in ipairs(lists) do
    if #list == 0 then list = lists[#lists] end
    -- Evenly over a long list, and all of a short one before any comes again.
    for j = 0, #list > 0 and count - 1 or -1 do
      rows[#rows + 1] = list[(#list > count and j * #list // count or j % #list) + 1]
    end
  end
  return ty.tensor(rows, { dtype = "i64" })
end

-- ---- finding by words ----

--- By how much volumes are nearer to texts that say that something is there than to texts that say that it is not:
-- the mean cosine with the ones less that with the others, [n]. Above 0 it is said to be there. image [n, d], present
-- [p, d], absent [q, d]: features of the prompts.
---@param image Tensor
---@param present Tensor
---@param absent Tensor
---@return Tensor
function M.present(image, present, absent)
  local who = "merlin.present"
  for name, x in pairs { image = image, present = present, absent = absent } do
    expect(who, name, x, "a tensor")
    if x.ndim ~= 2 or x:numel() == 0 or x.shape[2] ~= image.shape[#image.shape] then
      arguments.fail("%s: expected image [n, d], present [p, d] and absent [q, d], got %s, %s and %s", who,
        arguments.describe(image), arguments.describe(present), arguments.describe(absent))
    end
  end
  local direction = nn.normalize(present):mean(0) - nn.normalize(absent):mean(0)
  return nn.normalize(image):matmul(direction)
end

--- Finds by words in many volumes: scores f32 [n, prompts] of present(). volumes [n, channels, d, h, w]; prompts: a
-- list of { present, absent }, tokens i64 [p, t] and [q, t]. Also returns the features [n, width] of the volumes.
---@param model Merlin
---@param volumes Tensor
---@param prompts { present: Tensor, absent: Tensor }[]
---@return Tensor scores
---@return Tensor image
function M.find(model, volumes, prompts)
  local who = "merlin.find"
  expect(who, "model", model, "a module")
  expect(who, "volumes", volumes, "a tensor")
  expect(who, "prompts", prompts, "a list of tables")
  if not model.image_features or #prompts == 0 or volumes.ndim ~= 5 then
    arguments.fail("%s: expected a Merlin, volumes [n, channels, d, h, w] and at least one prompt, got %s, %s and %d",
      who, arguments.describe(model), arguments.describe(volumes), #prompts)
  end
  return ty.no_grad(function()
    local image = retrieval.embed(volumes.shape[1], function(start, rows)
      return model:image_features(volumes:narrow(0, start, rows):to { device = model:device() })
    end)
    local scores = {}
    for k, prompt in ipairs(prompts) do
      scores[k] = M.present(image, model:text_features(prompt.present), model:text_features(prompt.absent))
    end
    return ty.stack(scores, 1), image
  end)
end

return M
