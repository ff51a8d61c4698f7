--- One transformer over patches of pixels and words: no network of pictures. A picture is cut into patches, each goes
-- through one linear layer without a bias into the language model's sequence, between marks of its begin and its end
-- and with a mark between its rows, so that pictures of any shape are told apart. Patches are causal and have ordinary
-- positions, as words; only words are predicted. Chen et al. 2024, "SOLO: A Single Transformer for Scalable
-- Vision-Language Modeling" (arXiv 2407.06438), and its reference code, in which patches are of 32 x 32 pixels.
--
--     local solo = vlm.solo
--     local model = solo.Solo(llama, { patch = 8 })
--     local dialogue = vlm.Dialogue(tokenizer, { picture = model:marks(4, 4) })      -- of pictures 32 x 32
--     model:loss(tokens, targets, { pictures = pictures })
local ty = require "tycho"
local arguments = require "tycho.arguments"
local layers = require "tycho.models.layers"
local LanguageModel = require "tycho.models.model"

local nn = ty.nn
local expect = arguments.expect
local M = {}

--- The height and width that a picture is brought to: the longer side becomes the next multiple of the patch, at most
-- `most`, the other keeps the proportion and becomes the next multiple as well.
---@param height integer  pixels
---@param width integer
---@param options? { patch?: integer, most?: integer }  (32 and 1024, as in the reference code)
---@return integer height
---@return integer width
function M.size(height, width, options)
  local who = "vlm.solo.size"
  expect(who, "height", height, "an integer > 0")
  expect(who, "width", width, "an integer > 0")
  local o = arguments.read(who, options, { patch = 32, most = 1024 }, { patch = "an integer > 0",
    most = "an integer > 0" })
  if o.most % o.patch ~= 0 then
    arguments.fail("%s: most: expected a multiple of the patch, %d, got %d", who, o.patch, o.most)
  end
  local function up(x) return -(-x // o.patch) * o.patch end
  local long, short = math.max(height, width), math.min(height, width)
  local new_long = math.min(up(long), o.most)
  local new_short = math.max(o.patch, up(new_long * short // long))
  if height < width then return new_short, new_long end
  return new_long, new_short
end

--- Pictures [n, channels, height, width] in patches, row by row: [n, rows * columns, channels * patch * patch], the
-- numbers of a patch channel by channel. Height and width are multiples of the patch.
---@param pictures Tensor
---@param patch integer
---@return Tensor
function M.patches(pictures, patch)
  local who = "vlm.solo.patches"
  expect(who, "pictures", pictures, "a tensor")
  expect(who, "patch", patch, "an integer > 0")
  local shape = pictures.shape
  if #shape ~= 4 or shape[3] % patch ~= 0 or shape[4] % patch ~= 0 or shape[3] == 0 or shape[4] == 0 then
    arguments.fail("%s: pictures: expected [n, channels, height, width] in multiples of %d, got %s", who, patch,
      arguments.describe(pictures))
  end
  local n, c, rows, columns = shape[1], shape[2], shape[3] // patch, shape[4] // patch
  return pictures:reshape(n, c, rows, patch, columns, patch):permute(0, 2, 4, 1, 3, 5)
    :reshape(n, rows * columns, c * patch * patch)
end

--- A language model that takes patches of pictures among its tokens.
---@class Solo: LanguageModel
---@field language_model Decoder
---@field vocabulary integer  tokens of the language model before the four marks: begin, patch, row, stop
local Solo = nn.module("Solo", LanguageModel)
M.Solo = Solo

-- A copy of a language model whose vocabulary has so many more tokens, each the mean of the others.
local function grown(language, count)
  local config, state = language:published_config(), {}
  config.vocab_size = config.vocab_size + count
  for name, tensor in pairs(language:state_dict()) do
    if name:find "embed_tokens%.weight$" or name:find "lm_head%.weight$" then
      tensor = ty.concat({ tensor, tensor:mean({ 0 }, true):expand(count, tensor.shape[2]) }, 0)
    end
    state[name] = tensor
  end
  local copy = getmetatable(language)(config)
  ty.no_grad(function() copy:load_state_dict(state) end)
  return copy
end

--- language: a decoder of tycho.models (Llama, Mistral, Qwen2 ...), which is copied; its vocabulary grows by the four
-- marks. options: patch (32 pixels a side), channels (3).
---@param language LanguageModel
---@param options? { patch?: integer, channels?: integer }
function Solo:init(language, options)
  local who = "vlm.solo.Solo"
  expect(who, "language", language, "a module")
  local o = arguments.read(who, options, { patch = 32, channels = 3 }, { patch = "an integer > 0",
    channels = "an integer > 0" })
  if not language.published_config or not language.model or not language.model.embed_tokens then
    arguments.fail("%s: language: expected a decoder such as models.Llama, got %s", who, arguments.describe(language))
  end
  self.patch, self.channels = o.patch, o.channels
  self.vocabulary = language.config.vocab_size
  self.language_model = grown(language, 4)
  self.config, self.context = self.language_model.config, self.language_model.context
  self.embed_vision_patch = nn.Linear(o.channels * o.patch * o.patch, self.config.hidden_size, { bias = false })
end

--- The tokens of a picture of so many rows and columns of patches: the begin, the patches of the first row, a mark,
-- those of the next row, ..., the stop.
---@param rows integer
---@param columns integer
---@return integer[]
function Solo:marks(rows, columns)
  expect("Solo:marks", "rows", rows, "an integer > 0")
  expect("Solo:marks", "columns", columns, "an integer > 0")
  local ids = { self.vocabulary }
  for row = 1, rows do
    if row > 1 then ids[#ids + 1] = self.vocabulary + 2 end
    for _ = 1, columns do ids[#ids + 1] = self.vocabulary + 1 end
  end
  ids[#ids + 1] = self.vocabulary + 3
  return ids
end

--- What the linear layer makes of pictures [n, channels, height, width], or of their patches [n, places, numbers] as
-- patches() gives them: [n, places, hidden].
---@param pictures Tensor
---@return Tensor features
function Solo:picture_features(pictures)
  expect("Solo:picture_features", "pictures", pictures, "a tensor")
  return self.embed_vision_patch(pictures.ndim == 4 and M.patches(pictures, self.patch) or pictures)
end

-- The embeddings of tokens [n, t], with the patches of the pictures added at their tokens, in their order.
local function embed(self, tokens, options)
  local list = options.features or options.pictures
  if ty.is_tensor(list) then list = { list } end
  local parts = {}
  for i, one in ipairs(list) do
    local x = options.features and one or self:picture_features(one)
    parts[i] = x:flatten(0, 1)
  end
  local patches = #parts == 1 and parts[1] or ty.concat(parts, 0)
  local is_patch = tokens:eq(self.vocabulary + 1)
  local places = is_patch:to("i64"):sum():item()
  if places ~= patches.shape[1] then
    arguments.fail("Solo: pictures: expected as many patches as the %d tokens of patches, got %d", places,
      patches.shape[1])
  end
  local x = self.language_model.model.embed_tokens(tokens)
  if places == 0 then return x end
  local order = (is_patch:flatten():to("i64"):cumsum(0) - 1):clamp(0):reshape(tokens.shape)
  return x + ty.where(is_patch:unsqueeze(-1), ty.embedding(patches, order):to(x.dtype), 0.0)
end

--- Hidden states after the last norm, as Decoder:hidden() has them. options besides: pictures or features, as in
-- forward().
---@return Tensor hidden
function Solo:hidden(tokens, options)
  return layers.hidden_of_seen("Solo", self, tokens, options, embed)
end

--- Logits of hidden states: those of the language model's tokens, and of the four marks behind them.
function Solo:head(hidden) return self.language_model:head(hidden) end

--- tokens i64 [n, t] to logits [n, t, vocabulary + 4]. options: pictures [m, channels, height, width], or a list of
-- such where shapes differ, for the tokens of patches of all rows in their order; or in their place features, as
-- picture_features() gives them; the others as the language model has them. With a cache, pictures come with the call
-- that has their tokens.
---@param tokens Tensor
---@param options? table
---@return Tensor logits
function Solo:forward(tokens, options) return self:head(self:hidden(tokens, options)) end

--- Mean cross entropy, as LanguageModel:loss(); without targets, the marks and patches of pictures are none.
---@param tokens Tensor
---@param targets? Tensor
---@return Tensor loss
function Solo:loss(tokens, targets, options)
  expect("Solo:loss", "tokens", tokens, "a tensor")
  if not targets then
    local n, t = tokens.shape[1], tokens.shape[2]
    local follows = tokens:narrow(1, 1, t - 1)
    local none = ty.full({ n, 1 }, -100, { dtype = "i64", device = tokens.device })
    targets = ty.concat({ follows:masked_fill(follows:ge(self.vocabulary), -100), none }, 1)
  end
  return LanguageModel.loss(self, tokens, targets, options)
end

--- A cache for forward().
---@return KVCache
function Solo:cache(options) return self.language_model:cache(options) end

--- As LanguageModel:tied(): that of the language model.
---@return Module?
function Solo:tied() return self.language_model:tied() end

--- The token, or the list of tokens, that ends a text by the language model's config.
function Solo:end_tokens() return self.language_model:end_tokens() end

--- As LanguageModel:start(), with the pictures of all rows.
function Solo:start(tokens, mask, cache, pictures)
  if pictures then pictures = pictures:to { device = tokens.device } end
  return tokens, mask, function(input, given)
    local seen = pictures
    pictures = nil -- they are in the cache after the first call
    return self:head(self:hidden(input, { cache = cache, mask = given, last = 1, pictures = seen }):select(1, -1))
  end
end

return M
