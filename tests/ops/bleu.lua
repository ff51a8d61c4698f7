-- Row of src/ops/bleu.c. The reference is the plain Lua of llm.bleu, which tests/modules/llm/bleu_test.lua
-- compares with NLTK.

return function(row, T)
  local bleu = require "tycho.llm.bleu"
  local FEW = { "i64", "i32" }

  -- A row of ids: up to its length, or else to the padding; nil for a reference that is not there.
  local function ids_of(array, at, width, length, padding, may_lack)
    local list = {}
    for i = 1, length or width do
      local id = array[at * width + i]
      if not length and id == padding then break end
      list[i] = id
    end
    if may_lack and (length and length < 0 or not length and #list == 0) then return nil end
    return list
  end

  local function reference(x, y, ...)
    local o = { order = 4, padding = -1, smoothing = "none", epsilon = 0.1, k = 5 }
    local more = { ... } -- lengths and weights, of which some may be missing, and options
    local last = more[select("#", ...)]
    if last and not last.shape then
      more[select("#", ...)] = nil
      for key, value in pairs(last) do o[key] = value end
    end
    local x_lengths, y_lengths, weights = more[1], more[2], more[3]
    local n, t, s = x.shape[1], x.shape[2], y.shape[#y.shape]
    local r, order = #y.shape == 3 and y.shape[2] or 1, weights and #weights or o.order
    local options = { order = order, smoothing = o.smoothing, epsilon = o.epsilon, k = o.k }
    if weights then
      options.weights = {}
      for i = 1, order do options.weights[i] = weights[i] end
    end
    local sums = {} -- of the corpus: an order that a sentence lacks counts as one n-gram, as in NLTK
    for i = 1, 2 * order + 2 do sums[i] = 0 end
    local scores = { shape = { n }, dtype = o.dtype or "f32" }
    local counts = { shape = { n, 2 * order + 2 }, dtype = "i64" }
    for i = 0, n - 1 do
      local candidate = ids_of(x, i, t, x_lengths and x_lengths[i + 1], o.padding)
      local references, closest = {}, 0
      for j = 0, r - 1 do
        local at = i * r + j
        references[#references + 1] = ids_of(y, at, s, y_lengths and y_lengths[at + 1], o.padding, true)
      end
      local score, matches, totals = bleu.sentence(candidate, references, options)
      for j, list in ipairs(references) do
        local a, b = math.abs(#list - #candidate), math.abs(closest - #candidate)
        if j == 1 or a < b or (a == b and #list < closest) then closest = #list end
      end
      scores[i + 1] = score
      for _, list in ipairs { matches, totals, { #candidate, closest } } do
        table.move(list, 1, #list, #counts + 1, counts)
      end
      for k = 1, 2 * order + 2 do
        local count = counts[i * (2 * order + 2) + k]
        sums[k] = sums[k] + (k > order and k <= 2 * order and math.max(1, count) or count)
      end
    end
    if o.corpus then
      local matches, totals = table.move(sums, 1, order, 1, {}), table.move(sums, order + 1, 2 * order, 1, {})
      scores = { shape = {}, dtype = scores.dtype,
        bleu.score(matches, totals, sums[2 * order + 1], sums[2 * order + 2], options) }
    end
    return scores, counts
  end

  row("bleu", {
    cases = {
      { T { 3, 6, int = { 0, 3 } }, T { 3, 2, 7, int = { 0, 3 } } },
      { T { 3, 6, int = { 0, 3 } }, T { 3, 5, int = { 0, 3 } }, opts = { smoothing = "epsilon",
        epsilon = 0.5 } },
      { T { 4, 9, int = { 0, 4 } }, T { 4, 3, 8, int = { 0, 4 } }, T { 4, values = { 9, 0, 2, 5 }, dtype = "i64" },
        T { 4, 3, values = { 8, -1, 2, 0, 5, 7, -1, 1, 0, 3, 4, 5 }, dtype = "i32" },
        opts = { smoothing = "geometric" } },
      { T { 4, 9, int = { 0, 4 } }, T { 4, 3, 8, int = { 0, 4 } }, T { 4, values = { 1, 3, 2, 8 }, dtype = "i64" }, nil,
        T { 5, values = { 0.4, 0.3, 0.2, 0.05, 0.05 }, dtype = "f64" }, opts = { smoothing = "length", k = 3 } },
      { T { 4, 9, int = { 0, 4 } }, T { 4, 3, 8, int = { 0, 4 } }, opts = { smoothing = "add_one",
        padding = 2, dtype = "f64" } },
      { T { 2, 5, int = { 0, 3 } }, T { 2, 4, int = { 0, 3 } }, opts = { order = 1 } },
      -- any i64 is an id: also those that mark empty places in tables
      { T { 2, 4, values = { -1, math.mininteger, math.maxinteger, -1, -1, -1, -1, 0 }, dtype = "i64" },
        T { 2, 4, values = { -1, math.mininteger, math.maxinteger, 5, -1, 7, -1, -1 }, dtype = "i64" },
        opts = { order = 2, padding = 9 } },
      { T { 2, 3, values = { 1, 2, 3, 4, 5, 6 }, dtype = "i64" },
        T { 2, 3, values = { -1, 0, -1, -1, -1, -1 }, dtype = "i64" }, opts = { padding = 0 } },
      { T { 5, 9, int = { 0, 3 } }, T { 5, 2, 8, int = { 0, 3 } }, T { 5, values = { 9, 0, 2, 5, 8 }, dtype = "i64" },
        opts = { corpus = true } },
      { T { 300, 5, int = { 0, 4 } }, T { 300, 5, int = { 0, 4 } }, opts = { corpus = true, smoothing = "length" },
        dtypes = FEW },
      { T { 0, 4 }, T { 0, 2, 3 }, opts = { corpus = true } },
      { T { 0, 4 }, T { 0, 2, 3 } }, { T { 2, 0 }, T { 2, 2, 3 } }, { T { 2, 3 }, T { 2, 0, 3 } },
      { T { 2, 3 }, T { 2, 2, 0 } },
      { T { 70, 33, int = { 0, 4 } }, T { 70, 2, 40, int = { 0, 4 } }, opts = { smoothing = "geometric" },
        dtypes = FEW },
      { T { 3, 300, int = { 0, 5 } }, T { 3, 2, 333, int = { 0, 5 } }, dtypes = FEW },
      -- tables that no shared memory holds
      { T { 2, 1600, int = { 0, 9 } }, T { 2, 1500, int = { 0, 9 } }, dtypes = { "i64" } },
    },
    ref = reference,
    dtype = { "f32", "i64" },
    broadcast = false,
    errors = {
      { T { 3 }, T { 3, 2 }, match = "candidates: expected [n, t]" },
      { T { 3, 2 }, T { 3 }, match = "references: expected [n, r, s]" },
      { T { 3, 2 }, T { 2, 2 }, match = "references: expected those of the 3 candidates" },
      { T { 3, 2 }, T { 3, 2, dtype = "f32" }, match = "references: expected an integer" },
      { T { 3, 2 }, T { 3, 2 }, T { 2, dtype = "i64" }, match = "candidate_lengths: expected [3]" },
      { T { 3, 2 }, T { 3, 2 }, T { 3, dtype = "f32" }, match = "candidate_lengths: expected indices" },
      { T { 3, 2 }, T { 3, 1, 2 }, nil, T { 3, dtype = "i64" }, match = "reference_lengths: expected [3, 1]" },
      { T { 3, 2 }, T { 3, 2 }, T { 3, values = { 0, 3, 1 }, dtype = "i64" }, match = { "bleu", "3" } },
      { T { 3, 2 }, T { 3, 2 }, T { 3, values = { 0, -1, 1 }, dtype = "i64" }, match = { "bleu", "-1" } },
      { T { 3, 2 }, T { 3, 2 }, nil, T { 3, values = { 0, 3, 1 }, dtype = "i64" }, match = { "bleu", "3" } },
      { T { 3, 2 }, T { 3, 2 }, nil, nil, T { 0, dtype = "f64" }, match = "weights: expected a float tensor [order]" },
      { T { 3, 2 }, T { 3, 2 }, opts = { order = 0 }, match = "order: expected 1" },
      { T { 3, 2 }, T { 3, 2 }, opts = { smoothing = "method9" }, match = "smoothing: expected one of" },
      { T { 3, 2 }, T { 3, 2 }, opts = { smoothing = "length", k = 0 }, match = "k: expected a positive" },
      { T { 3, 2 }, T { 3, 2 }, opts = { dtype = "i64" }, match = "dtype: expected f32 or f64" },
    },
    big = function(ty)
      local x, y = ty.randint(0, 5, { 400, 60 }), ty.randint(0, 5, { 400, 3, 50 })
      local scores, counts = ty.bleu(x, y)
      return scores, counts, (ty.bleu(x, y, nil, nil, nil, { corpus = true }))
    end,
  })
end
