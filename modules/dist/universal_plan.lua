--- Who writes what of a checkpoint, and who reads what: each thing once, and as much for every rank as can be. Wan et
-- al. 2024, "ByteCheckpoint: A Unified Checkpointing System for Large Foundation Model Development".
local M = {}

--- What is written: pieces are cut into runs of at most `chunk` bytes, each with a key that is the same for all ranks
-- which have the same elements.
---@param pieces table[]   { name, slot, tensor, part, begin }, checked
---@param chunk integer
---@return table[]  { id, name, slot, part, begin, count, from (in the piece), piece (its number), bytes }
function M.runs(pieces, chunk)
  local list = {}
  for number, piece in ipairs(pieces) do
    local part, x = piece.part, piece.tensor
    local n, begin = x:numel(), piece.begin or 0
    local size = n > 0 and x:nbytes() // n or 1
    local step = math.max(1, chunk // size)
    local plain = { kind = part.kind, shape = part.shape, index = part.index, count = part.count, dim = part.dim,
      parts = part.parts, padded = part.padded }
    if part.kind == "replicated" then plain.index, plain.count = 0, 1 end -- whoever writes it
    for from = 0, math.max(n - 1, 0), step do
      local count = math.min(step, n - from)
      list[#list + 1] = { piece = number, from = from, count = count, bytes = count * size, name = piece.name,
        slot = piece.slot, begin = begin + from, part = plain,
        id = ("%s\0%s\0%d\0%d\0%d"):format(piece.name, piece.slot, plain.index, begin + from, count) }
    end
  end
  return list
end

--- Gives each of the items to one of the ranks that could have it: the largest first, each to the rank that has the
-- least until then.
---@param items { id: string, bytes: integer, ranks: integer[] }[]  ranks in ascending order, from 1 on
---@param ranks integer
---@return table<string, integer> to  the rank, by id
---@return integer[] loads  bytes of each rank
function M.assign(items, ranks)
  local order, loads, to = table.move(items, 1, #items, 1, {}), {}, {}
  for rank = 1, ranks do loads[rank] = 0 end
  table.sort(order, function(a, b)
    -- What only one can have comes first: it is no choice.
    if (#a.ranks == 1) ~= (#b.ranks == 1) then return #a.ranks == 1 end
    if a.bytes ~= b.bytes then return a.bytes > b.bytes end
    return a.id < b.id
  end)
  for _, item in ipairs(order) do
    local best = item.ranks[1]
    for _, rank in ipairs(item.ranks) do if loads[rank] < loads[best] then best = rank end end
    to[item.id] = best
    loads[best] = loads[best] + item.bytes
  end
  return to, loads
end

--- Of what ranks have, who writes it. lists: of each rank { { id, bytes }, ... }.
---@param lists table[][]
---@return table<string, integer> to
---@return integer[] loads
function M.writers(lists)
  local items, by_id = {}, {}
  for rank, list in ipairs(lists) do
    for _, run in ipairs(list) do
      local item = by_id[run[1]]
      if not item then
        item = { id = run[1], bytes = run[2], ranks = {} }
        by_id[run[1]], items[#items + 1] = item, item
      end
      if item.ranks[#item.ranks] ~= rank then table.insert(item.ranks, rank) end
    end
  end
  return M.assign(items, #lists)
end

return M
