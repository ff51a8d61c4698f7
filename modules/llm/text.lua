--- From tokens to text as they come.
local M = {}

--- A function of a token that returns the text it completes (perhaps none: half of a character waits for the rest). The
-- tokens before are decoded together with the new ones, because some tokenizers treat the first token of a text
-- differently.
---@param tokenizer table  with decode(ids)
---@return fun(token?: integer): string
function M.stream(tokenizer)
  local before, waiting = {}, {}
  return function(token)
    if token then waiting[#waiting + 1] = token end
    if #waiting == 0 then return "" end
    local old = #before > 0 and tokenizer:decode(before) or ""
    local all = tokenizer:decode(table.move(waiting, 1, #waiting, #before + 1, { table.unpack(before) }))
    local new = all:sub(#old + 1)
    -- U+FFFD at the end stands for bytes that are not whole yet; without a token: the text is over.
    if token and (new:sub(-3) == "\u{FFFD}" or not utf8.len(new)) then return "" end
    before, waiting = waiting, {}
    return new
  end
end

return M
