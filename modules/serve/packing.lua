--- Work that is packed into machines of several kinds, as cheaply as can be: every piece goes to one kind, which has
-- as many machines as its pieces fill. An integer program, solved exactly by branch and bound: linear programs say what
-- no packing can be cheaper than, their solutions rounded are packings. Griggs et al. 2024, "Melange: Cost Efficient
-- Large Language Model Serving by Exploiting GPU Heterogeneity", section 5.
--
--     local best = serve.packing { costs = { 1, 3.7 }, pieces = {
--       { loads = { 0.4, 0.1 }, count = 8 }, { loads = { 2.5, 0.3 }, count = 4 } } }
--     print(best.cost, best.machines[1], best.machines[2])
local arguments = require "tycho.arguments"

local expect, fail = arguments.expect, arguments.fail

local TINY = 1e-9

-- ---- a linear program ----

-- Column `enter` comes into the basis in place of that of a row.
local function pivot(rows, rhs, basis, leave, enter)
  local row = rows[leave]
  local by = row[enter]
  for k, a in pairs(row) do row[k] = a / by end
  rhs[leave] = rhs[leave] / by
  for i, other in ipairs(rows) do
    local a = i ~= leave and other[enter]
    if a and a ~= 0 then
      for k, b in pairs(row) do
        local new = (other[k] or 0) - a * b
        other[k] = math.abs(new) > 1e-12 and new or nil
      end
      rhs[i] = math.max(0, rhs[i] - a * rhs[leave])
      other[enter] = nil
    end
  end
  basis[leave] = enter
end

-- Minimizes c x for x >= 0 with rows { [column] = number, rhs } that begin at a basis: basis[i] is a column that row i
-- alone has, with 1. By the simplex method in a tableau of sparse rows; Bland's rule once it stands still.
local function minimize(rows, rhs, c, basis)
  local reduced, value = {}, 0
  for column, cost in pairs(c) do reduced[column] = cost end
  for i, column in ipairs(basis) do
    local cost = c[column] or 0
    if cost ~= 0 then
      value = value + cost * rhs[i]
      for k, a in pairs(rows[i]) do reduced[k] = (reduced[k] or 0) - cost * a end
    end
  end
  local still = 0
  while true do
    local enter, best = nil, -TINY
    for column, d in pairs(reduced) do
      if still > 50 then
        if d < -TINY and (not enter or column < enter) then enter = column end
      elseif d < best or d == best and enter and column < enter then
        enter, best = column, d
      end
    end
    if not enter then return value end
    local leave, least
    for i, row in ipairs(rows) do
      local a = row[enter]
      if a and a > TINY then
        local ratio = rhs[i] / a
        if not least or ratio < least - TINY or ratio < least + TINY and basis[i] < basis[leave] then
          leave, least = i, ratio
        end
      end
    end
    if not leave then return -math.huge end
    still = least < TINY and still + 1 or 0
    pivot(rows, rhs, basis, leave, enter)
    local d = reduced[enter]
    for k, b in pairs(rows[leave]) do reduced[k] = (reduced[k] or 0) - d * b end
    reduced[enter] = nil
    value = value + d * rhs[leave]
  end
end

-- Brings columns that are not allowed to nothing and takes them out; false where that cannot be.
local function clear(rows, rhs, basis, forbidden)
  if minimize(rows, rhs, forbidden, basis) > 1e-7 then return false end
  for i = #rows, 1, -1 do
    if forbidden[basis[i]] then
      local enter
      for k, a in pairs(rows[i]) do
        if not forbidden[k] and math.abs(a) > 1e-7 and (not enter or k < enter) then enter = k end
      end
      rhs[i] = 0
      if enter then
        pivot(rows, rhs, basis, i, enter)
      else -- it says nothing any more
        table.remove(rows, i)
        table.remove(rhs, i)
        table.remove(basis, i)
      end
    end
  end
  for _, row in ipairs(rows) do for k in pairs(forbidden) do row[k] = nil end end
  return true
end

-- The relaxation of a node: pieces may be cut, machines are at least and at most so many. Returns its cost, loads of
-- the kinds and shares by piece and kind; nil where no packing is in the node.
local function relax(problem, node)
  local kinds, pieces = problem.kinds, problem.pieces
  local n = #pieces
  -- Columns: share of piece b on kind j is (b - 1) * kinds + j; then, for each kind, more machines, machines that the
  -- node does not allow, room that is left, and machines that might be more; then slacks of bounds on shares.
  local function column(group, j) return (n + group) * kinds + j end
  local rows, rhs, c, basis, load, base, forbidden = {}, {}, {}, {}, {}, 0, {}
  for j = 1, kinds do
    load[j], base = 0, base + problem.costs[j] * node.low[j]
    c[column(0, j)], forbidden[column(1, j)] = problem.costs[j], 1
  end
  local bounds = {}
  for b, piece in ipairs(pieces) do
    local fixed, left, free = node.least[b], piece.count, {}
    local most = node.most[b]
    for j = 1, kinds do
      local k = fixed and fixed[j] or 0
      left = left - k
      load[j] = load[j] + k * (piece.loads[j] or 0)
    end
    if left < 0 then return nil end
    local cheapest
    for j = 1, kinds do
      local more = most and most[j] and most[j] - (fixed and fixed[j] or 0) or left
      if piece.loads[j] and more > 0 then
        free[#free + 1] = j
        if more < left then bounds[#bounds + 1] = { (b - 1) * kinds + j, more } end
        if more >= left and (not cheapest or problem.costs[j] * piece.loads[j]
          < problem.costs[cheapest] * piece.loads[cheapest]) then
          cheapest = j
        end
      end
    end
    if left > 0 then
      local row = {}
      for _, j in ipairs(free) do row[(b - 1) * kinds + j] = 1 end
      local i = #rows + 1
      rows[i], rhs[i] = row, left
      if cheapest then
        basis[i] = (b - 1) * kinds + cheapest
      else -- all are bounded
        row[-b], forbidden[-b], basis[i] = 1, 1, -b
      end
    end
  end
  local first = #rows
  for j = 1, kinds do
    local row, total = {}, load[j] - node.low[j]
    for b, piece in ipairs(pieces) do
      if piece.loads[j] then row[(b - 1) * kinds + j] = piece.loads[j] end
    end
    row[column(0, j)], row[column(1, j)], row[column(2, j)] = -1, -1, 1
    -- Basic shares go out of the row.
    for i = 1, first do
      local a = row[basis[i]]
      if a then
        for k, one in pairs(rows[i]) do
          local new = (row[k] or 0) - a * one
          row[k] = new ~= 0 and new or nil
        end
        total = total + a * rhs[i]
      end
    end
    local i = #rows + 1
    local room = node.high[j] - node.low[j]
    if total <= 0 then
      rows[i], rhs[i], basis[i] = row, -total, column(2, j)
    else
      for k, a in pairs(row) do row[k] = -a end
      rows[i], rhs[i], basis[i] = row, total, total <= room and column(0, j) or column(1, j)
    end
    if room < math.huge then
      local limit = { [column(0, j)] = 1, [column(3, j)] = 1 }
      local right = room
      if basis[i] == column(0, j) then
        for k, a in pairs(rows[i]) do limit[k] = (limit[k] or 0) - a end
        limit[column(0, j)] = nil
        right = room - rhs[i]
      end
      rows[i + 1], rhs[i + 1], basis[i + 1] = limit, right, column(3, j)
    end
  end
  for number, bound in ipairs(bounds) do
    local i, slack = #rows + 1, column(4, kinds) + number
    rows[i], rhs[i], basis[i] = { [bound[1]] = 1, [slack] = 1 }, bound[2], slack
  end
  for _, column_of in ipairs(basis) do
    if forbidden[column_of] then
      if not clear(rows, rhs, basis, forbidden) then return nil end
      break
    end
  end
  for _, row in ipairs(rows) do for k in pairs(forbidden) do row[k] = nil end end
  local value = base + minimize(rows, rhs, c, basis)
  local shares = {}
  for b, piece in ipairs(pieces) do
    shares[b] = {}
    for j = 1, kinds do shares[b][j] = piece.loads[j] and node.least[b] and node.least[b][j] or 0 end
  end
  local machines = {}
  for j = 1, kinds do machines[j] = node.low[j] end
  for i, at in ipairs(basis) do
    if rhs[i] > 1e-7 then
      if at <= n * kinds then
        local b, j = (at - 1) // kinds + 1, (at - 1) % kinds + 1
        shares[b][j] = shares[b][j] + rhs[i]
      elseif at <= (n + 1) * kinds then
        machines[at - n * kinds] = machines[at - n * kinds] + rhs[i]
      end
    end
  end
  return value, machines, shares
end

-- ---- packings ----

local function cost_of(problem, counts)
  local cost, machines = 0, {}
  for j = 1, problem.kinds do
    local load = 0
    for b, piece in ipairs(problem.pieces) do
      if counts[b][j] > 0 then load = load + counts[b][j] * piece.loads[j] end
    end
    machines[j] = math.ceil(load - TINY)
    cost = cost + problem.costs[j] * machines[j]
  end
  return cost, machines
end

-- Shares that are cut are made whole: what is left of each piece goes, one after the other, where it costs least.
local function round(problem, shares)
  local counts, loads = {}, {}
  for j = 1, problem.kinds do loads[j] = 0 end
  for b, piece in ipairs(problem.pieces) do
    counts[b] = {}
    for j = 1, problem.kinds do
      counts[b][j] = math.floor(shares[b][j] + 1e-7)
      if counts[b][j] > 0 then loads[j] = loads[j] + counts[b][j] * piece.loads[j] end
    end
  end
  local left = {}
  for b, piece in ipairs(problem.pieces) do
    local n, heaviest = piece.count, 0
    for j = 1, problem.kinds do
      n = n - counts[b][j]
      heaviest = math.max(heaviest, piece.loads[j] or 0)
    end
    for _ = 1, n do left[#left + 1] = { b, heaviest } end
  end
  table.sort(left, function(x, y)
    if x[2] ~= y[2] then return x[2] > y[2] end
    return x[1] < y[1]
  end)
  for _, entry in ipairs(left) do
    local b, best, least = entry[1], nil, math.huge
    for j, load in pairs(problem.pieces[b].loads) do
      local more = math.ceil(loads[j] + load - TINY) - math.ceil(loads[j] - TINY)
      local price = problem.costs[j] * (more + 1e-3 * load)
      if price < least or price == least and j < best then best, least = j, price end
    end
    counts[b][best] = counts[b][best] + 1
    loads[best] = loads[best] + problem.pieces[b].loads[best]
  end
  return counts
end

-- Moves single pieces while that makes a packing cheaper.
local function improve(problem, counts)
  local best = cost_of(problem, counts)
  local better = true
  while better do
    better = false
    for b, piece in ipairs(problem.pieces) do
      for from = 1, problem.kinds do
        for to in pairs(piece.loads) do
          if from ~= to and counts[b][from] > 0 then
            counts[b][from], counts[b][to] = counts[b][from] - 1, counts[b][to] + 1
            local now = cost_of(problem, counts)
            if now < best - TINY then best, better = now, true
            else counts[b][from], counts[b][to] = counts[b][from] + 1, counts[b][to] - 1 end
          end
        end
      end
    end
  end
  return counts
end

local function copy(list)
  local out = {}
  for key, value in pairs(list) do out[key] = value end
  return out
end

-- The two halves of a node: of a number of machines, or of a share, that is cut.
local function branch(problem, node, machines, shares)
  local at, worst = nil, 1e-6
  for j = 1, problem.kinds do
    local away = math.abs(machines[j] - math.floor(machines[j] + 0.5))
    if away > worst then at, worst = j, away end
  end
  if at then
    local whole = math.floor(machines[at])
    local below, above = copy(node), copy(node)
    below.high, above.low = copy(node.high), copy(node.low)
    below.high[at], above.low[at] = whole, whole + 1
    return below, above
  end
  local piece, kind
  for b, list in ipairs(shares) do
    for j = 1, problem.kinds do
      local away = math.abs(list[j] - math.floor(list[j] + 0.5))
      if away > worst then piece, kind, worst = b, j, away end
    end
  end
  if not piece then return nil end
  local whole = math.floor(shares[piece][kind])
  local below, above = copy(node), copy(node)
  below.most, above.least = copy(node.most), copy(node.least)
  below.most[piece], above.least[piece] = copy(node.most[piece] or {}), copy(node.least[piece] or {})
  below.most[piece][kind], above.least[piece][kind] = whole, whole + 1
  return below, above
end

--- The cheapest packing of pieces into machines of several kinds. problem: costs (of a machine, by kind), pieces
-- ({ loads, count }: what share of a machine a piece takes, by kind, false or math.huge where the kind cannot take it;
-- count pieces are alike), nodes (10,000: of the search at most), gap (0: a packing that is dearer by at most this
-- share of the bound will do).
---@param problem { costs: number[], pieces: { loads: number[], count: integer }[], nodes?: integer, gap?: number }
---@return { cost: number, machines: integer[], counts: integer[][], bound: number, proven: boolean,
---  nodes: integer }|nil  counts: by piece and kind; bound: no packing is cheaper; proven: whether none is cheaper than
-- this one (but for the gap); nil where a piece fits nowhere
return function(problem)
  local who = "serve.packing"
  local o = arguments.read(who, problem, { costs = {}, pieces = {}, nodes = 10000, gap = 0.0 },
    { costs = "a list of numbers > 0", pieces = "a list of tables", nodes = "an integer >= 1",
      gap = "a finite number >= 0" })
  local kinds = #o.costs
  if kinds == 0 then fail("%s: costs: expected at least one, got none", who) end
  local p = { kinds = kinds, costs = o.costs, pieces = {} }
  for i, piece in ipairs(o.pieces) do
    local name = ("pieces[%d]."):format(i)
    expect(who, name .. "count", piece.count, "an integer in [0, 1000000]")
    expect(who, name .. "loads", piece.loads, "a table")
    local loads, any = {}, false
    for j = 1, kinds do
      local load = piece.loads[j]
      if load and load ~= math.huge then
        expect(who, ("%sloads[%d]"):format(name, j), load, "a finite number >= 0")
        loads[j], any = load, true
      end
    end
    if piece.count > 0 then
      if not any then return nil end
      p.pieces[#p.pieces + 1] = { loads = loads, count = piece.count, at = i }
    end
  end
  local root = { low = {}, high = {}, least = {}, most = {} }
  for j = 1, kinds do root.low[j], root.high[j] = 0, math.huge end
  local best, counts, count, open = math.huge, nil, 0, {}
  local function look(node)
    count = count + 1
    local value, machines, shares = relax(p, node)
    if not value or value >= best - TINY then return end
    local found = improve(p, round(p, shares))
    local cost = cost_of(p, found)
    if cost < best - TINY then best, counts = cost, found end
    node.value, node.machines, node.shares = value, machines, shares
    if value < best - TINY then open[#open + 1] = node end
  end
  look(root)
  local bound = root.value or 0
  while #open > 0 and count < o.nodes do
    local at = 1
    for i = 2, #open do if open[i].value < open[at].value then at = i end end
    local node = open[at]
    open[at] = open[#open]
    open[#open] = nil
    bound = math.max(bound, math.min(node.value, best))
    if best <= bound * (1 + o.gap) + TINY then
      open = {}
      break
    end
    local below, above = branch(p, node, node.machines, node.shares)
    if below then
      look(below)
      look(above)
    end
  end
  if #p.pieces == 0 then best, counts, bound = 0, {}, 0 end
  if not counts then return nil end
  local _, machines = cost_of(p, counts)
  local all = {}
  for i = 1, #o.pieces do
    all[i] = {}
    for j = 1, kinds do all[i][j] = 0 end
  end
  for b, piece in ipairs(p.pieces) do all[piece.at] = counts[b] end
  local proven = #open == 0
  return { cost = best, machines = machines, counts = all, bound = proven and o.gap == 0 and best or bound,
    proven = proven, nodes = count }
end
