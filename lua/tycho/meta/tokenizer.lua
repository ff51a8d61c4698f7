---@meta
-- Declarations of tokenizers' methods, which are written in C: see core.lua.

--- Text to ids and back: see ty.tokenizer, which makes it. Ids count from 0, and so do offsets.
---@class Tokenizer
---@field size integer the largest id, plus one: the rows of an embedding
---@field model "BPE"|"Unigram"|"WordPiece"|"WordLevel"
---@field pad integer? the id that fills batches up
---@field pad_side "left"|"right"
---@field bos integer?
---@field eos integer?
---@field chat_template string?
local Tokenizer = {}

---@class EncodeOptions
---@field special? boolean add [CLS], <s> and the like; true when left out
---@field plain? boolean special tokens that stand in the text are text like any other
---@field max_length? integer cut to so many tokens, special ones counted ...
---@field truncate? "right"|"left" ... at this side
---@field pair? string a second text
---@field offsets? boolean
---@field types? boolean

--- The ids of a text, [n] i64. With `offsets` or `types` a table comes second, with `offsets` [n, 2], the bytes begin
--- to end (not included) of the text, and `types` [n], which of the two texts. Bytes that are no UTF-8 count as U+FFFD.
---@param text string
---@param options? EncodeOptions
---@return Tensor ids
---@return {offsets: Tensor?, types: Tensor?}?
function Tokenizer:encode(text, options) end

--- The text of ids: a list, a tensor with one dimension, or one id. Special tokens are left out unless skip_special is
--- false. U+FFFD stands for bytes that are no UTF-8. Raises on ids that the vocabulary does not have.
---@param ids integer|integer[]|Tensor
---@param options? {skip_special?: boolean}
---@return string
function Tokenizer:decode(ids, options) end

--- Decodes ids as they come: stream:put(ids) gives the text that is whole by now, maybe "", never half a character;
--- stream:finish() what is left.
---@param options? {skip_special?: boolean}
---@return table
function Tokenizer:stream(options) end

--- The id of a token as the vocabulary writes it, or nil.
---@param token string
---@return integer?
function Tokenizer:id(token) end

--- The token of an id and, for added ones, whether it is special; nil when there is none.
---@param id integer
---@return string?
---@return "special"|"added"|nil
function Tokenizer:token(id) end

--- Writes a tokenizer.json, which others read, too; into a folder also tokenizer_config.json.
---@param path string a file, or a folder that is there
function Tokenizer:save(path) end

--- The text of its tokenizer.json.
---@return string
function Tokenizer:json() end

---@class ty.tokenizer
local tokenizer = {}

--- The table of a tokenizer's fields besides those that the C part knows (bos, eos, chat_template ...), to be filled.
---@param tok Tokenizer
---@return table
function tokenizer.fields(tok) end

return Tokenizer, tokenizer
