--- Models as lists of layers, each from a tensor to a tensor, which pipelines divide over ranks.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local nn = ty.nn

-- A decoder without its body: of the model its plain fields, which its methods look at, and the modules that are
-- wanted. A rank that keeps one layer does not keep all.
local function hollow(model, body, head)
  local self = { model = body, lm_head = head }
  for key, value in next, model do
    if self[key] == nil and not arguments.is_module(value) and not ty.is_tensor(value) then self[key] = value end
  end
  return setmetatable(self, getmetatable(model))
end

local Embedding = nn.module "PipelineEmbedding"

function Embedding:init(model)
  self.embed_tokens = model.model.embed_tokens
  rawset(self, "like", hollow(model, { embed_tokens = self.embed_tokens }))
end

-- tokens i64 [n, t] to [n, t, hidden].
function Embedding:forward(tokens) return self.like:embed(tokens) end

local Layer = nn.module "PipelineLayer"

function Layer:init(model, number)
  self.layer = model.model.layers[number]
  self.number, self.rotary, self.local_rotary = number, model.rotary, model.local_rotary
  self.interleaved = model.interleaved or false
end

-- [n, t, hidden] to the same: the stream with all that is added to it. packed: of sequences in x [1, n, hidden] their
-- cu_seqlens, positions i64 [1, n], and longest.
function Layer:forward(x, packed)
  local t = x.shape[2]
  local at = { causal = true, interleaved = self.interleaved, layer = self.number,
    cu_seqlens = packed and packed.cu_seqlens }
  local function turns(by)
    local cos, sin = by:table(packed and packed.longest or t, x.device)
    if not packed then return cos:narrow(0, 0, t), sin:narrow(0, 0, t) end
    return ty.embedding(cos, packed.positions):unsqueeze(1), ty.embedding(sin, packed.positions):unsqueeze(1)
  end
  at.cos, at.sin = turns(self.rotary)
  if self.local_rotary then at.local_cos, at.local_sin = turns(self.local_rotary) end
  local stream, more = self.layer(x, nil, at)
  return more and stream + more or stream
end

local Head = nn.module "PipelineHead"

function Head:init(model)
  self.norm = model.model.norm
  -- A head that is tied keeps the embedding.
  if model.lm_head then self.lm_head = model.lm_head else self.embed_tokens = model.model.embed_tokens end
  rawset(self, "like", hollow(model, { embed_tokens = self.embed_tokens, norm = self.norm }, self.lm_head))
end

-- [n, t, hidden] to logits [n, t, vocabulary].
function Head:forward(x) return self.like:head(self.norm(x)) end

--- The layers of a model, each a module from a tensor to a tensor, with the model's own parameters: those of a
-- Sequential or ModuleList; of a decoder (models.Llama and its like, with rotary positions) the embedding, the layers,
-- and the last norm with the head. What is given as a list stays as it is.
---@param model Module|Module[]
---@return Module[]
return function(model)
  local who = "dist.pipeline.layers"
  arguments.expect(who, "model", model, "a table")
  local list = {}
  if not arguments.is_module(model) or model.append then
    for i = 1, #model do list[i] = arguments.expect(who, ("layer %d"):format(i), model[i], "a module") end
    if #list == 0 then arguments.fail("%s: model: expected at least one layer, got none", who) end
    return list
  end
  local body = model.model
  if not (model.family and model.rotary and arguments.is_module(body) and body.embed_tokens and body.layers) then
    arguments.fail("%s: model: expected a Sequential, a list of modules or a decoder with rotary positions, got %s",
      who, arguments.describe(model))
  end
  if model.bias then
    arguments.fail("%s: model: expected a decoder without biased scores, got %s", who, arguments.describe(model))
  end
  list[1] = Embedding(model)
  for i = 1, #body.layers do list[i + 1] = Layer(model, i) end
  list[#list + 1] = Head(model)
  return list
end
