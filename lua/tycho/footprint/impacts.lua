-- What a GPU costs before it runs, and electricity while it runs, in the 16 impact categories of the European
-- Commission's Product Environmental Footprint (EF 3.0). Figures are data of others: each table names its source.
local M = {}

--- The categories: short name, what it is, unit.
M.categories = {
  { "ap", "acidification", "mol H+ eq" },
  { "gwp", "climate change", "kg CO2 eq" },
  { "ctue", "ecotoxicity, freshwater", "CTUe" },
  { "pm", "particulate matter", "disease incidence" },
  { "epf", "eutrophication, freshwater", "kg P eq" },
  { "epm", "eutrophication, marine", "kg N eq" },
  { "ept", "eutrophication, terrestrial", "mol N eq" },
  { "ctuh_c", "human toxicity, cancer", "CTUh" },
  { "ctuh_nc", "human toxicity, non-cancer", "CTUh" },
  { "ir", "ionising radiation", "kBq U-235 eq" },
  { "lu", "land use", "points" },
  { "odp", "ozone depletion", "kg CFC-11 eq" },
  { "pocp", "photochemical ozone", "kg NMVOC eq" },
  { "adpf", "resource use, fossils", "MJ" },
  { "adpe", "resource use, minerals and metals", "kg Sb eq" },
  { "wu", "water use", "m3 eq" },
}

local function by_category(names, rows)
  local tables = {}
  for i, name in ipairs(names) do
    tables[name] = {}
    for key, values in pairs(rows) do tables[name][key] = values[i] or nil end
  end
  return tables
end

--- An A100 SXM4 of 40 GB from the cradle to the factory's gate, by component. Falk et al. 2025, "More than Carbon",
-- arXiv:2509.00093, supplement (github.com/sophia-falk/more-than-carbon): a card was taken apart and its elements
-- measured. `dies` are the GPU and its memory, `pop` is what the supplement calls POP, `transport` the way to the
-- factory.
M.a100 = by_category({ "casing", "heatsink", "board", "dies", "pop", "transport" }, {
  ap = { 7.65e-3, 3.28e-1, 8.28e-2, 5.82e-1, 4.31e-2, 3.10e-3 },
  gwp = { 8.81e-1, 4.80, 8.14, 105.0, 7.49, 4.64e-1 },
  ctue = { 67.3, 350.0, 130.0, 1340.0, 96.5, 3.12e-1 },
  pm = { 4.36e-8, 2.00e-6, 4.79e-7, 3.21e-6, 2.42e-7, 2.67e-8 },
  epf = { 5.73e-6, 2.34e-3, 2.00e-5, 3.27e-4, 2.32e-5, 1.74e-7 },
  epm = { 8.06e-4, 5.40e-3, 5.93e-3, 6.98e-2, 5.00e-3, 1.46e-3 },
  ept = { 8.80e-3, 6.61e-2, 6.35e-2, 7.28e-1, 5.21e-2, 1.60e-2 },
  ctuh_c = { 5.35e-9, 3.49e-5, 3.18e-6, 8.20e-8, 1.68e-7, 8.28e-12 },
  ctuh_nc = { 5.45e-7, 4.61e-6, 5.90e-7, 5.89e-7, 7.28e-8, 1.03e-9 },
  ir = { 8.51e-2, 525.0, 48.3, 2.04, 2.49, 1.13e-3 },
  lu = { 7.14e-2, 5.58, 2.28e-2, 4.18e-1, 2.95e-2, 0.0 },
  odp = { 1.87e-7, 1.29e-6, 2.69e-6, 4.58e-5, 3.22e-6, 7.10e-10 },
  pocp = { 2.91e-3, 3.74e-2, 2.36e-2, 2.29e-1, 1.65e-2, 4.06e-3 },
  adpf = { 16.5, 64.0, 126.0, 1380.0, 98.0, 6.46 },
  adpe = { 5.41e-5, 5.08e-3, 9.13e-4, 1.61e-4, 1.34e-4, 1.82e-8 },
  wu = { 0.467, 16.9, 4.75, 35.9, 3.41, 1.76e-3 },
})

--- What the parts of any card cost for each unit of them, means of seven cards: a kg of casing, a kg of heatsink, a
-- cm2 of populated board, a mm2 of processor and of memory with what the wafer loses, a kg of card carried a km by
-- truck and by plane, a kg at the end of its life. ADEME 2026, "Analyses de cycle de vie de GPU pour l'intelligence
-- artificielle" (Lees-Perasso et al.), the parametric model.
M.parts = by_category({ "casing", "heatsink", "board", "chip", "memory", "truck", "plane", "end_of_life" }, {
  ap = { 5.96e-2, 2.18e-1, 3.16e-4, 2.35e-4, 1.01e-3, 3.19e-7, 8.77e-6, 3.17e-2 },
  gwp = { 8.25, 5.74, 3.25e-2, 4.26e-2, 1.84e-1, 5.04e-5, 2.11e-3, 1.51 },
  ctue = { 409.0, 420.0, 5.24e-1, 5.44e-1, 2.35, 3.39e-5, 1.37e-3, 762.0 },
  pm = { 3.74e-7, 1.36e-6, 1.70e-9, 1.30e-9, 5.59e-9, 2.59e-12, 5.44e-11, 9.63e-8 },
  epf = { 3.90e-5, 1.50e-3, 1.21e-7, 1.33e-7, 5.72e-7, 1.89e-11, 7.44e-10, 3.11e-5 },
  epm = { 6.62e-3, 5.22e-3, 2.45e-5, 2.83e-5, 1.22e-4, 1.50e-7, 3.95e-6, 2.11e-2 },
  ept = { 7.24e-2, 6.04e-2, 2.64e-4, 2.94e-4, 1.27e-3, 1.64e-6, 4.32e-5, 1.47e-2 },
  ctuh_c = { 3.47e-8, 2.15e-5, 4.22e-9, 9.72e-12, 1.72e-11, 8.85e-16, 3.19e-14, 5.89e-9 },
  ctuh_nc = { 3.22e-6, 2.78e-6, 1.69e-9, 2.32e-10, 9.95e-10, 9.58e-14, 1.67e-12, 2.33e-7 },
  ir = { 4.78, 325.0, 9.69e-2, 4.60e-4, 1.54e-3, 1.23e-7, 3.89e-6, 1.23e-1 },
  lu = { 5.07e-1, 3.54, 1.39e-4, 1.70e-4, 7.31e-4, 0.0, 0.0, 6.74 },
  odp = { 1.26e-6, 1.15e-6, 4.80e-9, 1.86e-8, 8.01e-8, 7.72e-14, 2.44e-12, 1.39e-7 },
  pocp = { 2.51e-2, 2.99e-2, 9.71e-5, 9.25e-5, 3.99e-4, 4.14e-7, 1.06e-5, 5.37e-3 },
  adpf = { 243.0, 85.0, 5.10e-1, 5.56e-1, 2.40, 7.03e-4, 2.95e-2, 19.5 },
  adpe = { 4.08e-4, 1.87e-3, 1.27e-5, 1.55e-8, 5.07e-9, 1.98e-12, 8.31e-11, 3.71e-6 },
  wu = { 3.89, 10.5, 1.62e-2, 1.48e-2, 7.08e-2, 1.91e-7, 8.38e-6, 730.0 },
})

--- A kWh from the socket, by country. ADEME Base IMPACTS (2011), except the human toxicities, ecotoxicity and water,
-- which that source leaves out: UNECE 2021, "Life Cycle Assessment of Electricity Generation Options", by technology,
-- weighted with the country's mix of 2023 (Ember). Land use is in neither, and not counted.
M.grids = by_category({ "france", "germany", "usa" }, {
  ap = { 2.10e-4, 1.76e-3, 3.67e-3 },
  gwp = { 8.13e-2, 6.57e-1, 6.80e-1 },
  ctue = { 4.04e-2, 1.91e-1, 1.45e-1 },
  pm = { 4.16e-9, 1.03e-8, 2.78e-8 },
  epf = { 3.27e-8, 3.08e-8, 2.60e-8 },
  epm = { 7.61e-5, 2.65e-4, 3.95e-4 },
  ept = { 4.98e-4, 1.96e-3, 4.30e-3 },
  ctuh_c = { 1.32e-9, 4.84e-9, 2.72e-9 },
  ctuh_nc = { 5.35e-9, 3.65e-8, 2.38e-8 },
  ir = { 3.23, 9.58e-1, 8.20e-1 },
  odp = { 8.77e-10, false, 1.29e-10 },
  pocp = { 2.11e-4, 7.53e-4, 1.24e-3 },
  adpf = { 9.31, 8.75, 9.69 },
  adpe = { 4.86e-8, 8.79e-8, 9.86e-8 },
  wu = { 9.45e-2, 5.30e-2, 6.85e-2 },
})

return M
