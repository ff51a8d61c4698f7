--- What sequences have in common: full pages of tokens that were computed once serve every later request that begins
-- with the same tokens. Pages form a tree of beginnings; those that nobody uses stay until their room is needed, the
-- ones longest unused first. Zheng et al. 2023, "SGLang: Efficient Execution of Structured Language Model Programs"
-- (RadixAttention).

--- The pages of beginnings.
---@class Prefixes
local Prefixes = {}
Prefixes.__index = Prefixes

--- Of the pages of a pool.
---@param pool PagePool
---@return Prefixes
function Prefixes.new(pool)
  return setmetatable({ pool = pool, roots = {}, clock = 0, count = 0 }, Prefixes)
end

-- Tokens [first, first + page) of a list, as a key.
local function key_of(tokens, first, page) return table.concat(tokens, ",", first, first + page - 1) end

function Prefixes:touch(node)
  self.clock = self.clock + 1
  node.used = self.clock
end

--- Where the beginnings of a kind begin: keys and values of the same tokens that are not the same, those under an
-- adapter, have trees of their own.
---@param kind? string
---@return table node
function Prefixes:root(kind)
  local root = self.roots[kind or false]
  if not root then
    root = { children = {} }
    self.roots[kind or false] = root
  end
  return root
end

--- The pages that hold the longest beginning of `tokens`, but for the last token at least, which is to be computed.
---@param tokens integer[]
---@param kind? string
---@return integer[] pages
---@return table node  where the beginning ends, for add()
function Prefixes:find(tokens, kind)
  local page, node, pages = self.pool.page, self:root(kind), {}
  for first = 1, #tokens - page, page do
    local next_node = node.children[key_of(tokens, first, page)]
    if not next_node then break end
    node = next_node
    self:touch(node)
    pages[#pages + 1] = node.page
  end
  return pages, node
end

--- Keeps the page that holds the tokens [first, first + page) of a list, behind `node`, unless the same is there.
-- Returns the node behind it.
---@param node table
---@param tokens integer[]
---@param first integer  counted from 1
---@param page integer
---@return table node
function Prefixes:add(node, tokens, first, page)
  local key = key_of(tokens, first, self.pool.page)
  local own = node.children[key]
  if not own then
    own = { children = {}, parent = node, key = key, page = page }
    node.children[key] = own
    self.pool:share(page)
    self.count = self.count + 1
  end
  self:touch(own)
  return own
end

--- Gives back up to `count` pages that only this tree holds, always the longest unused one behind which none follows.
-- Returns how many.
---@param count integer
---@return integer freed
function Prefixes:evict(count)
  local ends, freed = {}, 0
  local function visit(node)
    for _, child in pairs(node.children) do
      if next(child.children) then visit(child) else ends[#ends + 1] = child end
    end
  end
  for _, root in pairs(self.roots) do visit(root) end
  table.sort(ends, function(a, b) return a.used < b.used end)
  local i = 1
  while freed < count and ends[i] do
    local node = ends[i]
    if self.pool.references[node.page] == 1 then
      local before = node.parent
      before.children[node.key] = nil
      self.pool:release(node.page)
      self.count, freed = self.count - 1, freed + 1
      if before.parent and not next(before.children) then -- none follows it now: it waits for its turn
        local at = i + 1
        while ends[at] and ends[at].used < before.used do at = at + 1 end
        table.insert(ends, at, before)
      end
    end
    i = i + 1
  end
  return freed
end

--- Gives back all pages of a kind, of which no request runs.
---@param kind? string
function Prefixes:forget(kind)
  local function visit(node)
    for _, child in pairs(node.children) do
      visit(child)
      self.pool:release(child.page)
      self.count = self.count - 1
    end
  end
  if self.roots[kind or false] then visit(self.roots[kind or false]) end
  self.roots[kind or false] = nil
end

return Prefixes
