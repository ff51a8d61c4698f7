-- Matrices for the rows of linear algebra: numbers that are the same at every run, and matrices as lists of rows for
-- the references.

local M = {}

-- well(m, n, batch), positive(n, batch) and number(), which go on from a seed.
function M.numbers(seed)
  -- Numbers between -1 and 1 that are the same at every run.
  local state = seed
  local function number()
    state = (state * 1103515245 + 12345) % 2147483648
    return state / 1073741824 - 1
  end

  -- [m, n] (of a batch) with singular values well apart from 0 and from each other
  local function well(m, n, batch)
    local v = {}
    for _ = 1, batch or 1 do
      for i = 1, m do
        for j = 1, n do v[#v + 1] = (number() + (i == j and 1 + i * 0.75 or 0)) * 0.5 end
      end
    end
    return v
  end

  local function positive(n, batch) -- symmetric and positive definite
    local v = {}
    for _ = 1, batch or 1 do
      local a = well(n, n)
      for i = 1, n do
        for j = 1, n do
          local sum = i == j and 0.25 or 0
          for k = 1, n do sum = sum + a[(i - 1) * n + k] * a[(j - 1) * n + k] end
          v[#v + 1] = sum
        end
      end
    end
    return v
  end

  return well, positive, number
end

-- fn(matrix as rows, which) for each matrix of x [..., m, n]
function M.each(x, fn)
  local nd = #x.shape
  local m, n, batch = x.shape[nd - 1], x.shape[nd], 1
  for d = 1, nd - 2 do batch = batch * x.shape[d] end
  for b = 0, batch - 1 do
    local a = {}
    for i = 1, m do
      a[i] = {}
      for j = 1, n do a[i][j] = x[b * m * n + (i - 1) * n + j] end
    end
    fn(a, b)
  end
  return m, n
end

function M.put(to, a)
  for i = 1, #a do
    if type(a[i]) == "table" then table.move(a[i], 1, #a[i], #to + 1, to) else to[#to + 1] = a[i] end
  end
end

function M.shaped(x, ...)
  local shape = table.move(x.shape, 1, #x.shape - 2, 1, {})
  for _, n in ipairs { ... } do shape[#shape + 1] = n end
  return { shape = shape }
end

function M.turned(a, m, n)
  local t = {}
  for j = 1, n do
    t[j] = {}
    for i = 1, m do t[j][i] = a[i][j] end
  end
  return t
end

function M.averaged(a, n)
  local s = {}
  for i = 1, n do
    s[i] = {}
    for j = 1, n do s[i][j] = (a[i][j] + a[j][i]) / 2 end
  end
  return s
end

return M
